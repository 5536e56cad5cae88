// Views, filters, and charts, which are drawn when they scroll into view. Texts are never inserted as markup.
(() => {
  "use strict";
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const DEFAULT_VIEW = "crossovers";
  const NARROW_PX = 420;
  const AXIS_PX = 80;
  const [LEAST_STEP_PX, NUMBER_PX, MOST_STEP_PX] = [8, 23, 48];
  let page = null; // the page's current content; the dashboard replaces it as a whole

  // --- data

  async function inflated(text) {
    if (!text) return null;
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  // In a file the charts' script is part of the page, and the policy has the hash of its text.
  async function loadCharts() {
    const packed = document.getElementById("nsa-tune-charts");
    if (!packed || window.nsaTuneEmbed) return;
    const script = document.createElement("script");
    script.textContent = await inflated(packed.textContent);
    document.body.append(script);
  }

  function unpack(columns) {
    const fields = Object.entries(columns);
    const count = fields.length ? fields[0][1].length : 0;
    return Array.from({ length: count }, (_, i) =>
      Object.fromEntries(fields.map(([name, column]) => [name, column[i]])),
    );
  }

  // A panel's rows, unpacked when it is first drawn.
  function rowsOf(content) {
    if (!content.unpacked) {
      const cells = unpack(content.cells);
      const times = unpack(content.times);
      cells.forEach((cell) => (cell.times = []));
      times.forEach((time) => cells[time.cell].times.push(time));
      content.unpacked = cells;
    }
    return content.unpacked;
  }

  // --- state, in the URL's hash

  function readHash() {
    const state = new URLSearchParams(location.hash.slice(1));
    if (page.table) {
      const at = [...page.table.options].findIndex(({ value }) => value === state.get("table"));
      page.table.selectedIndex = Math.max(at, 0);
    }
    const known = page.buttons.some((button) => button.dataset.view === state.get("view"));
    page.view = known ? state.get("view") : DEFAULT_VIEW;
    for (const panel of page.panels) {
      const select = panel.querySelector("select.line");
      if (!select) continue;
      const first = page.data ? page.data.panels[panel.id].first : 0;
      const index = Number(state.get(panel.id) ?? NaN);
      select.value = String(index in select.options ? index : first);
      page.lines.set(panel.id, Number(select.value));
    }
  }

  function writeHash() {
    const state = new URLSearchParams();
    if (page.view !== DEFAULT_VIEW) state.set("view", page.view);
    if (page.table?.selectedIndex > 0) state.set("table", page.table.value);
    for (const [id, index] of page.lines) {
      if (index !== page.data?.panels[id].first) state.set(id, String(index));
    }
    const hash = state.toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function show() {
    for (const section of document.querySelectorAll("section.table")) {
      section.hidden = Boolean(page.table) && section.dataset.table !== page.table.value;
    }
    for (const card of document.querySelectorAll("article")) {
      card.hidden = card.dataset.view !== page.view;
    }
    for (const button of page.buttons) {
      button.setAttribute("aria-pressed", String(button.dataset.view === page.view));
    }
  }

  // --- tooltips

  const tip = document.createElement("dl");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function showTip(_handler, event, item, value) {
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    tip.replaceChildren();
    for (const [name, text] of [...Object.entries(value), ...timesOf(item?.datum)]) {
      const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
      term.textContent = name;
      detail.textContent = text;
      tip.append(term, detail);
    }
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const top = Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8);
    tip.style.left = `${Math.max(left, 8)}px`;
    tip.style.top = `${Math.max(top, 8)}px`;
  }

  // The tooltip of a map's cell: time, interval, samples and regret of each choice.
  function timesOf(datum) {
    const times = datum?.times ?? [];
    const best = Math.min(...times.map((time) => time.us));
    return times.map((time) => {
      const spread = (100 * (time.high - time.low)) / 2 / time.us;
      const regret = 100 * (time.us / best - 1);
      return [
        time.choice,
        `${time.us} us ±${spread.toPrecision(2)} %, n ${time.samples}, regret ${regret.toFixed(1)} %`,
      ];
    });
  }

  // --- charts

  // On a narrow page a legend has two columns, else its end would be cut.
  function themeFor(element) {
    const theme = page.data.themes[dark.matches ? "dark" : "light"];
    if (element.clientWidth > NARROW_PX) return theme;
    return { ...theme, legend: { ...theme.legend, columns: 2, labelLimit: 130 } };
  }

  // The map with columns as wide as there is room for.
  function fitted(spec, element, cells) {
    const columns = new Set(cells.map((cell) => cell.x)).size;
    const room = Math.floor((element.clientWidth - AXIS_PX) / columns);
    const step = Math.min(Math.max(room, LEAST_STEP_PX), MOST_STEP_PX);
    const values = { hatched: 0.94 * Math.min(step, spec.height.step), numbers: step >= NUMBER_PX };
    const params = spec.params.map(({ name }) => ({ name, value: values[name] }));
    return { ...spec, width: { step }, params };
  }

  function embed(element, spec, datasets, description) {
    const config = themeFor(element);
    const params = [...(spec.params ?? []), { name: "dark", value: dark.matches }];
    // ast: Vega interprets expressions, because the page's policy forbids compiling them.
    const options = {
      ast: true, actions: false, renderer: "svg", defaultStyle: false, config, tooltip: showTip,
    };
    // Like with_rows in theme.py: drop layers without rows, which Vega cannot scale.
    const layer = spec.layer.filter(({ data }) => !data || datasets[data.name].length > 0);
    const full = { ...spec, layer, params, datasets, description };
    return window.nsaTuneEmbed(element, full, options);
  }

  async function draw(panel) {
    if (panel.querySelector("details:not([open])")) return;
    const state = `${page.lines.get(panel.id) ?? ""} ${panel.clientWidth} ${dark.matches}`;
    if (page.drawn.get(panel.id) === state) return;
    page.drawn.set(panel.id, state);
    await drawLine(panel, page.data.panels[panel.id]);
    panel.dataset.drawn = state;
  }

  function caption(figure, words) {
    figure.querySelector("figcaption").textContent = words;
    return words;
  }

  async function drawLine(panel, content) {
    const line = content.lines[page.lines.get(panel.id)];
    const [map, curves] = panel.querySelectorAll("figure");
    const cells = rowsOf(content).filter((cell) => cell.facet === line.facet);
    const limit = cells.find((cell) => cell.kind === "only" && cell.limit !== "-")?.limit;
    panel.querySelector(".sentence").textContent = line.sentence;
    const place = map.querySelector(".chart");
    const shown = fitted(content.map, place, cells);
    const numbered = shown.params.some(({ name, value }) => name === "numbers" && value);
    const mapWords = caption(
      map,
      `Fastest choice${line.facet ? `, ${line.facet}` : ""}. ` +
        `${numbered ? "Number: second over first. " : "Point at a cell for its times. "}` +
        `Pale: tie or unsure.${limit ? ` Hatched: no other is allowed (${limit}).` : ""}`,
    );
    const curveWords = caption(
      curves,
      `Time${line.label ? `, ${line.label}` : ""}. Bands: 95 % intervals. ` +
        `Vertical lines: crossovers, dotted where a limit ends a choice.`,
    );
    const rows = {
      estimates: unpack(line.estimates), measured: measured(cells, line), edges: unpack(line.edges),
    };
    const [picture] = await Promise.all([
      embed(place, shown, { cells }, mapWords),
      embed(curves.querySelector(".chart"), content.curves, rows, curveWords),
    ]);
    picture.view.addEventListener("click", (_event, item) => {
      const at = content.lines.findIndex(
        (other) => other.facet === line.facet && other.y === item?.datum?.y,
      );
      if (at >= 0) choose(panel, at);
    });
  }

  // The measured points of a line are the times of its cells on the map.
  function measured(cells, line) {
    return cells.filter((cell) => cell.y === line.y).flatMap((cell) => {
      const best = Math.min(...cell.times.map((time) => time.us));
      return cell.times.map((time) => ({
        ...time, x: cell.x, over: `${(time.us / best).toPrecision(3)}x`,
      }));
    });
  }

  function choose(panel, index) {
    page.lines.set(panel.id, index);
    panel.querySelector("select.line").value = String(index);
    writeHash();
    draw(panel);
  }

  // --- start, and start again after the dashboard replaced the page

  async function start() {
    page?.watcher?.disconnect();
    const form = document.querySelector("form.filters");
    await loadCharts();
    page = {
      data: JSON.parse(await inflated(document.getElementById("nsa-tune-data").textContent)),
      table: form.querySelector("select[name=filter-table]"),
      buttons: [...document.querySelectorAll("nav.views button")],
      panels: [...document.querySelectorAll("article.panel")],
      view: DEFAULT_VIEW,
      lines: new Map(), // panel id -> index of its line
      drawn: new Map(), // panel id -> what it was drawn for
      visible: new Set(),
    };
    form.hidden = form.elements.length === 0;
    document.querySelectorAll("nav.views").forEach((nav) => (nav.hidden = false));
    if (page.data) document.querySelectorAll(".charts").forEach((place) => (place.hidden = false));
    refresh();
    if (page.data) watch();
  }

  function watch() {
    const current = page;
    page.watcher = new IntersectionObserver(
      (entries) => {
        for (const { target, isIntersecting } of entries) {
          if (isIntersecting) current.visible.add(target);
          else current.visible.delete(target);
          if (isIntersecting && current === page) draw(target);
        }
      },
      { rootMargin: "200px" },
    );
    page.panels.forEach((panel) => page.watcher.observe(panel));
  }

  function refresh() {
    readHash();
    show();
    if (page.data) page.visible.forEach(draw);
  }

  document.addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("change", (event) => {
    const panel = event.target.closest("article.panel");
    if (event.target.matches("select.line")) {
      if (page.data) choose(panel, Number(event.target.value));
    } else if (event.target.closest("form.filters")) {
      show();
      writeHash();
    }
  });
  document.addEventListener("click", (event) => {
    const button = event.target.closest("nav.views button");
    if (!button) return;
    page.view = button.dataset.view;
    show();
    writeHash();
  });
  const redraw = () => page?.data && page.visible.forEach(draw);
  document.addEventListener("toggle", redraw, true);
  window.addEventListener("resize", redraw);
  window.addEventListener("hashchange", refresh);
  dark.addEventListener("change", redraw);
  document.addEventListener("nsa-tune-replaced", start);
  start();
})();
