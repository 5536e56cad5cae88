// Filters, and charts that are drawn when they come into view. All text is inserted as text.
(async () => {
  "use strict";
  const data = await unpacked(document.getElementById("nsa-tune-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const form = document.querySelector("form.filters");
  const panels = [...document.querySelectorAll("article.panel")];
  const chosen = new Map(); // panel id -> index of its line
  const drawn = new Map(); // panel id -> what it was drawn for

  async function unpacked(text) {
    if (!text) return null;
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return JSON.parse(await new Response(stream).text());
  }

  // --- state, in the URL's hash

  const filters = () => (form ? [...form.elements].filter((element) => element.name) : []);

  const firstOf = (id) => (data ? data.panels[id].first : 0);

  function readHash() {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const select of filters()) {
      const wanted = state.get(select.name.replace("filter-", ""));
      const known = [...select.options].some((option) => option.value === wanted);
      select.selectedIndex = known ? [...select.options].findIndex((o) => o.value === wanted) : 0;
    }
    for (const panel of panels) {
      const select = panel.querySelector("select.line");
      const index = Number(state.get(panel.id) ?? NaN);
      select.value = String(index in select.options ? index : firstOf(panel.id));
      chosen.set(panel.id, Number(select.value));
    }
  }

  function writeHash() {
    const state = new URLSearchParams();
    for (const select of filters()) {
      if (select.selectedIndex > 0) state.set(select.name.replace("filter-", ""), select.value);
    }
    for (const [id, index] of chosen) if (index !== firstOf(id)) state.set(id, String(index));
    const hash = state.toString();
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
  }

  function applyFilters() {
    const wanted = Object.fromEntries(
      filters().map((select) => [select.name.replace("filter-", ""), select.value]),
    );
    for (const section of document.querySelectorAll("section.table")) {
      section.hidden = ["gpu", "model", "heads", "kv"].some(
        (name) => name in wanted && section.dataset[name] !== wanted[name],
      );
    }
    for (const panel of panels) {
      const question = wanted.question ?? "all";
      panel.hidden = question !== "all" && panel.dataset.question !== question;
    }
  }

  // --- charts

  function unpack(columns) {
    const fields = Object.keys(columns);
    const count = fields.length ? columns[fields[0]].length : 0;
    return Array.from({ length: count }, (_, i) =>
      Object.fromEntries(fields.map((field) => [field, columns[field][i]])),
    );
  }

  const tip = document.createElement("dl");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  function showTip(_handler, event, _item, value) {
    tip.hidden = value === null || value === undefined || value === "";
    if (tip.hidden) return;
    tip.replaceChildren();
    for (const [name, text] of Object.entries(value)) {
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

  function embed(element, spec, datasets) {
    const config = data.themes[dark.matches ? "dark" : "light"];
    const params = [...(spec.params ?? []), { name: "dark", value: dark.matches }];
    // ast: expressions are interpreted, not compiled, as the page's policy asks.
    const options = {
      ast: true, actions: false, renderer: "svg", defaultStyle: false, config, tooltip: showTip,
    };
    // As with_rows in charts.py: a layer without rows has no extent.
    const layer = spec.layer.filter((one) => !one.data || datasets[one.data.name].length > 0);
    return window.nsaTuneEmbed(element, { ...spec, layer, params, datasets }, options);
  }

  async function draw(panel) {
    const content = data.panels[panel.id];
    const index = chosen.get(panel.id);
    const line = content.lines[index];
    const state = `${index} ${dark.matches}`;
    if (drawn.get(panel.id) === state) return;
    drawn.set(panel.id, state);
    const [map, curves] = panel.querySelectorAll("figure");
    panel.querySelector(".sentence").textContent = line.sentence;
    map.querySelector("figcaption").textContent =
      "Fastest choice" + (line.facet ? `, ${line.facet}` : "") +
      ". Pale: tie or unsure. Hatched: a limit forbids the rest. Number: second over first.";
    curves.querySelector("figcaption").textContent =
      "Time" + (line.label ? `, ${line.label}` : "") +
      ". Bands: 95 % intervals. Vertical lines: crossovers, dotted where a limit ends a choice.";
    const cells = unpack(content.cells).filter((cell) => cell.facet === line.facet);
    const rows = Object.fromEntries(
      Object.entries(line.rows).map(([name, packed]) => [name, unpack(packed)]),
    );
    const describe = (spec, figure) => ({
      ...spec, description: figure.querySelector("figcaption").textContent,
    });
    const [picture] = await Promise.all([
      embed(map.querySelector(".chart"), describe(content.map, map), { cells }),
      embed(curves.querySelector(".chart"), describe(content.curves, curves), rows),
    ]);
    picture.view.addEventListener("click", (_event, item) => {
      const at = content.lines.findIndex(
        (other) => other.facet === line.facet && other.y === item?.datum?.y,
      );
      if (at >= 0) choose(panel, at);
    });
    panel.dataset.drawn = state;
  }

  function choose(panel, index) {
    chosen.set(panel.id, index);
    panel.querySelector("select.line").value = String(index);
    writeHash();
    draw(panel);
  }

  const visible = new Set();
  const watcher = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        if (isIntersecting) visible.add(target);
        else visible.delete(target);
        if (isIntersecting) draw(target);
      }
    },
    { rootMargin: "200px" },
  );

  // --- start

  function refresh() {
    readHash();
    applyFilters();
    if (data) visible.forEach(draw);
  }

  if (form) {
    form.hidden = false;
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", () => {
      applyFilters();
      writeHash();
    });
  }
  refresh();
  window.addEventListener("hashchange", refresh);
  if (!data) return;
  dark.addEventListener("change", () => visible.forEach(draw));
  for (const panel of panels) {
    panel.querySelector(".charts").hidden = false;
    panel.querySelector("select.line").addEventListener("change", (event) => {
      choose(panel, Number(event.target.value));
    });
    watcher.observe(panel);
  }
})();
