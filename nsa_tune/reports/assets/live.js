// Polls the state of runs every two seconds, and replaces the page's content when it has changed.
// Texts are never inserted as markup.
(() => {
  "use strict";
  const POLL_MS = 2000;
  const HIDDEN_POLL_MS = 15000;
  const LEAST_BETWEEN_PAGES_MS = 8000;
  const SILENT_S = 300; // a run that has stored nothing for this long was probably killed
  let tag = "";
  let live = null;
  let replacedAt = performance.now();

  function element(kind, words, name) {
    const made = document.createElement(kind);
    if (words !== undefined) made.textContent = words;
    if (name) made.className = name;
    return made;
  }

  const seconds = (since) => Math.max((Date.now() - Date.parse(since)) / 1000, 0);

  function lasting(duration) {
    if (duration < 90) return `${Math.round(duration)} s`;
    return duration < 5400 ? `${Math.round(duration / 60)} min` : `${Math.round(duration / 3600)} h`;
  }

  function ago(moment) {
    const gone = seconds(moment);
    return Number.isFinite(gone) ? `${lasting(gone)} ago` : "at an unknown time";
  }

  function time(row) {
    if (row.status !== "ok") return `${row.status}: ${row.reason}`;
    return `${Number(row.latency_us.toPrecision(4))} us`;
  }

  function list(title, rows) {
    const part = element("div");
    const items = element("ol");
    for (const row of rows) items.append(element("li", `${row.arm} on ${row.batch}: ${time(row)}`));
    part.append(element("h3", title), items);
    return part;
  }

  // By the time that the run has. When a run without a limit has measured enough, cannot be told before.
  function progress(run) {
    const bar = element("progress");
    bar.value = Math.min(seconds(run.started_at) / run.arguments.budget_s, 1);
    bar.setAttribute("aria-label", "time used");
    return bar;
  }

  function runWords(run) {
    const silent = seconds(run.measured_at ?? run.started_at);
    const failed = run.failed ? `, ${run.failed} failed` : "";
    const parts = [`${run.measurements} measurements${failed}`];
    if (run.arguments.budget_s) {
      const rest = run.arguments.budget_s - seconds(run.started_at);
      parts.push(rest > 0 ? `at most ${lasting(rest)} left` : "its time is over");
    }
    parts.push(
      silent > SILENT_S ? `nothing for ${Math.round(silent / 60)} min: it was probably killed`
        : `the last ${ago(run.measured_at ?? run.started_at)}`,
    );
    return parts.join("; ");
  }

  function running(database, run) {
    const box = element("div", undefined, "run");
    const what = run.what ? `${run.what} on ${run.gpu}` : "nothing stored yet";
    box.append(element("h2", `Run ${run.number} in ${database.name}: ${what}`));
    if (run.arguments.budget_s) box.append(progress(run));
    box.append(element("p", runWords(run)));
    const now = element("div", undefined, "now");
    const ofRun = (rows) => rows.filter((row) => row.run === run.number);
    now.append(list("Newest", ofRun(database.newest)));
    if (ofRun(database.failures).length) now.append(list("Failures", ofRun(database.failures)));
    box.append(now);
    return box;
  }

  function resting(database) {
    const box = element("div", undefined, "run");
    const last = database.runs[0];
    const ended = last ? `the last run ended ${ago(last.ended_at)} (${last.outcome}, ${last.measurements} measurements)` : "";
    box.append(element("p", `${database.name}: no run is going on${ended ? `; ${ended}` : ""}.`, "note"));
    return box;
  }

  function show() {
    const strip = document.getElementById("live");
    const boxes = [];
    for (const database of live.databases) {
      if (database.problem) {
        const box = element("div", undefined, "run");
        box.append(element("p", database.problem.replaceAll("`", ""), "problem"));
        boxes.push(box);
        continue;
      }
      const going = database.runs.filter((run) => !run.outcome);
      going.forEach((run) => boxes.push(running(database, run)));
      if (!going.length && database.runs.length) boxes.push(resting(database));
    }
    strip.replaceChildren(...boxes);
  }

  // The new content comes escaped from the same server; scripts in it do not run.
  async function replace() {
    const answer = await fetch(`.${location.search}`, { cache: "no-cache" });
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const place = window.scrollY;
    for (const query of ["main", "h1", "form.filters", "nav.views", "#nsa-tune-data"]) {
      const [old, now] = [document.querySelector(query), fresh.querySelector(query)];
      if (old && now) old.replaceWith(document.adoptNode(now));
      else if (now && query === "nav.views") document.querySelector("form.filters").before(document.adoptNode(now));
    }
    document.title = fresh.title;
    document.getElementById("live").dataset.state = fresh.getElementById("live").dataset.state;
    replacedAt = performance.now();
    document.dispatchEvent(new Event("nsa-tune-replaced"));
    window.scrollTo(0, place);
  }

  const busy = () =>
    document.activeElement?.matches("main select, main .scroll, form.filters select") ?? false;

  async function poll() {
    try {
      const answer = await fetch("api/live", { headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag") ?? "";
        live = await answer.json();
      }
      if (live) show();
      const shown = document.getElementById("live").dataset.state;
      const rested = performance.now() - replacedAt > LEAST_BETWEEN_PAGES_MS;
      if (live && live.state !== shown && rested && !busy()) await replace();
    } catch (problem) {
      if (!(problem instanceof TypeError)) throw problem; // a TypeError means that the dashboard is not running any more
    }
    setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
  }

  poll();
})();
