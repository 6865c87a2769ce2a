"use strict";
// The page's own script. Everything is built by DOM calls and textContent: names come from servers and may be anything.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const ALL = -1;
  const SEGMENTS = DATA.segments;
  const SOURCES = DATA.sources;
  const root = document.documentElement;
  const state = { endpoint: ALL, model: ALL, outcome: DATA.outcomes.indexOf("completed"), mode: "mean", kind: 1, order: "total", shown: 20 };
  let charts = [];

  // --- small helpers --------------------------------------------------------------------------------------------------

  function h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "width") element.style.width = value;
      else if (name === "margin") element.style.marginLeft = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  }
  const body = (id) => document.querySelector(`#${id} .body`);
  const css = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
  const many = (n) => n.toLocaleString("en-US");
  const named = (text) => text || "(not given)";
  const word = (text) => text.replaceAll("_", " ");

  // Seconds as people say them; blank where unknown, never 0.
  function time(s) {
    if (s === null || s === undefined) return "";
    if (s >= 3600) return pair(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min");
    if (s >= 60) return pair(Math.floor(s / 60), "min", Math.floor(s % 60), "s");
    if (s >= 0.9995) return `${trim(s)} s`;
    return s >= 1e-5 ? `${trim(s * 1e3)} ms` : `${trim(s * 1e6)} µs`;
  }
  const pair = (a, large, b, small) => (b ? `${many(a)} ${large} ${b} ${small}` : `${many(a)} ${large}`);
  const trim = (v) => (v >= 100 ? v.toFixed(0) : v >= 10 ? v.toFixed(1) : v.toFixed(2));
  const number = (v) => (v === null || v === undefined ? "" : trim(v));
  function percent(share) {
    if (share === null || share === undefined || Number.isNaN(share)) return "";
    const value = share * 100;
    if (value > 0 && value < 0.1) return "< 0.1 %";
    return value >= 9.95 && (value < 99.5 || value === 100) ? `${value.toFixed(0)} %` : `${Math.min(value, 99.9).toFixed(1)} %`;
  }
  // On an axis: the shortest form.
  const tick = (s) => (s === 0 ? "0" : s >= 600 ? time(s) : s >= 1 ? `${Number(s.toPrecision(3))} s` : s >= 1e-3 ? `${Number((s * 1e3).toPrecision(3))} ms` : `${Number((s * 1e6).toPrecision(3))} µs`);
  const stamp = (unix, withMs) => new Date(unix * 1e3).toISOString().replace("T", " ").slice(0, withMs ? 23 : 19);

  // A column is [n, min, mean, p50, max, p95, p99].
  const C = { n: 0, min: 1, mean: 2, p50: 3, max: 4, p95: 5, p99: 6 };
  const at = (column, name) => (column ? column[C[name]] : null);
  const select = (e, m, o) => DATA.selections[`${e},${m},${o}`];
  const current = () => select(state.endpoint, state.model, state.outcome);

  function table(caption, head, rows) {
    return [h("p", { class: "note cap" }, caption), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", { "aria-label": caption }, h("thead", {}, head.map((row) => h("tr", {}, row))), h("tbody", {}, rows)))];
  }
  const th = (text, more) => h("th", { scope: "col", ...more }, text);
  const td = (text, more) => h("td", more, text);
  const dot = (segment) => h("span", { class: `dot ${segment}`, "aria-hidden": "true" });
  function replace(id, ...children) { body(id).replaceChildren(...children.flat(2).filter(Boolean)); }

  // --- filters --------------------------------------------------------------------------------------------------------

  const filters = document.getElementById("filters");
  const output = h("output", { "aria-live": "polite" });
  function choice(label, key, names, all) {
    const box = h("select", { "aria-label": label, onchange: (event) => { state[key] = Number(event.target.value); state.shown = 20; render(); } },
      h("option", { value: ALL }, all), names.map((name, i) => h("option", { value: i }, named(word(name)))));
    box.value = state[key];
    filters.append(h("label", {}, label, box));
  }
  choice("Endpoint", "endpoint", DATA.endpoints, "all endpoints");
  choice("Model", "model", DATA.models, "all models");
  choice("Outcome", "outcome", DATA.outcomes, "all outcomes");
  filters.append(output);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.hidden = false;

  // --- theme ----------------------------------------------------------------------------------------------------------

  const button = document.getElementById("theme");
  const prefers = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefers.matches);
  function remembered(value) {
    try {
      if (value) localStorage.setItem("spanwire-theme", value);
      return localStorage.getItem("spanwire-theme");
    } catch { return null; } // a browser that keeps nothing for files
  }
  function themed() { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", `Switch to ${button.textContent.toLowerCase()} colours`); }
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; remembered(root.dataset.theme); themed(); drawTime(); });
  prefers.addEventListener("change", () => { themed(); drawTime(); });
  button.hidden = false;
  themed();

  // --- key numbers ----------------------------------------------------------------------------------------------------

  function tile(key, value, small) {
    return h("div", { class: "tile" }, h("div", { class: "k" }, key), h("div", { class: "v" }, value || "–"), h("div", { class: "s" }, small || "unknown"));
  }
  function p95(column, show) {
    if (!column) return "";
    return at(column, "p95") === null ? `median of ${many(at(column, "n"))}` : `median; p95 ${show(at(column, "p95"))}`;
  }
  function drawTiles(s) {
    const known = s.cold + s.warm;
    document.getElementById("tiles").replaceChildren(
      tile("Calls", many(s.calls), `${time(s.sum)} in all`),
      tile("Time to first token", time(at(s.times.first_content, "p50")), p95(s.times.first_content, time)),
      tile("Inter-token latency", time(at(s.times.inter_token, "p50")), p95(s.times.inter_token, time)),
      tile("Tokens a second", number(at(s.times.tokens_per_s, "p50")), s.times.tokens_per_s ? `median of one call; ${many(s.tokens.output)} tokens` : ""),
      tile("Whole call", time(at(s.times.total, "p50")), p95(s.times.total, time)),
      tile("Re-used connections", known ? percent(s.warm / known) : "", known ? `${many(s.cold)} cold, ${many(s.warm)} warm` : ""));
  }

  // --- where the time goes --------------------------------------------------------------------------------------------

  function sources(bySource) {
    const sum = bySource.reduce((a, b) => a + b, 0);
    if (!sum) return "";
    const some = bySource.map((v, i) => [v / sum, SOURCES[i]]).filter(([v]) => v > 0).sort((a, b) => b[0] - a[0]);
    return some.length === 1 ? some[0][1] : some.map(([v, name]) => `${percent(v)} ${name}`).join(", ");
  }
  function drawWhere(s) {
    const wholes = s.rows.filter((row) => !row[1]);
    const label = wholes.map((row) => `${row[0]} ${percent(row[2] / s.sum)}`).join(", ");
    replace("where",
      h("div", { class: "bar", role: "img", "aria-label": `Shares of the time: ${label}` },
        wholes.map((row) => h("span", { class: row[0], width: `${(100 * row[2]) / s.sum}%`, title: `${row[0]} ${percent(row[2] / s.sum)}` }))),
      h("ul", { class: "legend", "aria-hidden": "true" }, wholes.map((row) => h("li", {}, dot(row[0]), `${row[0]} ${percent(row[2] / s.sum)}`))),
      table(`Segments of ${many(s.calls)} calls. Percentiles are over the calls that have the segment.`,
        [[th("Segment", { class: "l" }), th("Share of the time"), th("Calls that have it"), th("Median"), th("p95"), th("p99"), th("Longest"), th("Source", { class: "l" })]],
        s.rows.map((row) => {
          const [segment, part, sum, bySource, column] = row;
          return h("tr", { class: part ? "part" : null }, h("th", { scope: "row" }, part ? word(part) : [dot(segment), segment]),
            td(percent(sum / s.sum)), td(many(at(column, "n"))), td(time(at(column, "p50"))), td(time(at(column, "p95"))), td(time(at(column, "p99"))), td(time(at(column, "max"))),
            td(sources(bySource), { class: "l" }));
        })));
  }

  // --- over time ------------------------------------------------------------------------------------------------------

  const MODES = [["mean", "Mean of a call"], ["rest", "Mean without model"], ["share", "Share"], ["sum", "Sum"]];
  function dates(u, splits, axis, space, step) { // 24 hours, and the date where it is new
    let before = "";
    return splits.map((v) => {
      const text = stamp(v, true);
      const day = text.slice(0, 10);
      if (step >= 86400) return day;
      const clock = text.slice(11, step >= 60 ? 16 : step >= 1 ? 19 : 23);
      const shown = day === before ? clock : `${clock}\n${day}`;
      before = day;
      return shown;
    });
  }
  function spread(b, values) { // to one entry for each bucket, and one more: bars reach to the right
    const column = new Array(DATA.buckets + 1).fill(null);
    b.index.forEach((i, k) => { column[i] = values[k]; });
    return column;
  }
  function axes(values) {
    const stroke = () => css("muted");
    const grid = { stroke: () => css("line"), width: 1 };
    return [
      { stroke, grid, ticks: grid, font: "12px system-ui, sans-serif", values: dates, space: 90 },
      { stroke, grid, ticks: grid, font: "12px system-ui, sans-serif", size: 62, values: (u, splits) => splits.map((v) => (v === null ? "" : values(v))) },
    ];
  }
  function chart(where, label, height, options, data) {
    const box = h("div", { class: "chart", role: "img", "aria-label": label });
    where.append(box);
    const width = () => Math.max(240, box.clientWidth);
    const plot = new uPlot({
      width: width(), height, ...options,
      tzDate: (ts) => uPlot.tzDate(new Date(ts * 1e3), "Etc/UTC"),
      cursor: {
        sync: { key: "time" }, points: { show: false }, y: false,
        dataIdx: (u, series, closest, at) => Math.max(0, Math.min(DATA.buckets - 1, Math.floor((at - DATA.begin) / DATA.width))), // the bar under the pointer
      },
      scales: { x: { time: true, range: (u, low, high) => [low, high] }, ...options.scales },
    }, data, box);
    charts.push({ plot, resize: () => plot.setSize({ width: width(), height }) });
  }
  function asTable(title, head, rows) {
    const details = h("details", {}, h("summary", {}, "The same as a table"));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) {
        details.append(...table(title, [[th("From (UTC)", { class: "l" }), ...head.map((text) => th(text))]], rows().map(([first, ...rest]) => h("tr", {}, h("th", { scope: "row" }, first), rest.map((text) => td(text))))));
      }
    });
    return details;
  }
  function drawTime() {
    const s = current();
    charts.forEach(({ plot }) => plot.destroy());
    charts = [];
    const where = body("time");
    where.replaceChildren();
    if (!s) return;
    if (!DATA.buckets) {
      where.append(h("p", { class: "note" }, "These calls have no time of day, so there is nothing to draw over time."));
      return;
    }
    const b = s.over;
    const x = Array.from({ length: DATA.buckets + 1 }, (_, i) => DATA.begin + i * DATA.width);
    const every = time(DATA.width);
    const bars = uPlot.paths.bars({ size: [1, Infinity], align: 1, gap: DATA.buckets > 120 ? 0 : 1 });
    const when = (i) => stamp(DATA.begin + i * DATA.width, DATA.width < 1);
    const xSeries = { label: "UTC", value: (u, v) => (v === null ? "" : stamp(v, DATA.width < 1)) };

    // Stacked: the whole is drawn first, and each smaller sum over it.
    const mean = (v, k) => v / b.calls[k];
    const scale = { mean, rest: mean, share: (v, k, sum) => v / sum, sum: (v) => v }[state.mode];
    const show = state.mode === "share" ? percent : time;
    const raw = SEGMENTS.map(() => []);
    const stacked = SEGMENTS.map(() => []);
    b.index.forEach((_, k) => {
      const sum = SEGMENTS.reduce((total, _name, i) => total + b.segments[i][k], 0);
      let below = 0;
      SEGMENTS.forEach((_name, i) => {
        const value = sum && (state.mode !== "rest" || SEGMENTS[i] !== "model") ? scale(b.segments[i][k], k, sum) : 0;
        raw[i].push(value);
        below += value;
        stacked[i].push(below);
      });
    });
    const present = SEGMENTS.map((name, i) => i).filter((i) => raw[i].some((v) => v > 0)).reverse();
    const values = present.map((i) => spread(b, raw[i]));
    where.append(h("div", { class: "chart-title", id: "t-stack" }, `Segments, one bar for each ${every}`),
      h("div", { class: "modes", role: "group", "aria-label": "What a bar shows" }, MODES.map(([mode, text]) =>
        h("button", { type: "button", "aria-pressed": String(state.mode === mode), onclick: () => { state.mode = mode; drawTime(); } }, text))));
    chart(where, `Stacked bars: where the time of calls went, for each ${every}. The same numbers are in the table below.`, 260, {
      axes: axes(state.mode === "share" ? percent : tick),
      series: [xSeries, ...present.map((i, k) => ({
        label: SEGMENTS[i], fill: () => css(SEGMENTS[i]), stroke: () => css(SEGMENTS[i]), width: 0, paths: bars, points: { show: false },
        value: (u, v, _series, index) => (index === null || values[k][index] === null ? "" : show(values[k][index])),
      }))],
      scales: { y: { range: (u, low, high) => [0, state.mode === "share" ? 1 : (high || 1) * 1.05] } },
    }, [x, ...present.map((i) => spread(b, stacked[i]))]);
    where.append(asTable("Segments over time", [...present.map((i) => SEGMENTS[i])].reverse(), () => b.index.map((bucket, k) => [when(bucket), ...[...present].reverse().map((i) => show(raw[i][k]))])));

    const lines = [["Whole call p95", b.total_p95, "unattributed", [5, 4]], ["Whole call, median", b.total_p50, "unattributed", null], ["First token p95", b.first_p95, "model", [5, 4]], ["First token, median", b.first_p50, "model", null]]
      .filter(([, column]) => column.some((v) => v > 0));
    where.append(h("div", { class: "chart-title" }, "Time to first token, and whole calls (logarithmic)"));
    chart(where, `Lines: median and p95 of the time to first token and of whole calls, for each ${every}. The same numbers are in the table below.`, 240, {
      axes: axes(tick),
      series: [xSeries, ...lines.map(([label, , colour, dash]) => ({
        label, stroke: () => css(colour === "unattributed" ? "muted" : colour), width: 2, dash, spanGaps: true, points: { show: DATA.buckets < 30 }, value: (u, v) => time(v),
      }))],
      scales: { y: { distr: 3, range: (u, low, high) => (low > 0 ? [low / 1.4, high * 1.4] : [0.001, 1]) } },
    }, [x.map((v) => v + DATA.width / 2), ...lines.map(([, column]) => spread(b, column.map((v) => (v > 0 ? v : null))))]);
    where.append(asTable("Percentiles over time", lines.map(([label]) => label), () => b.index.map((bucket, k) => [when(bucket), ...lines.map(([, column]) => time(column[k]))])));

    where.append(h("div", { class: "chart-title" }, `Calls for each ${every}, and how many of them opened a connection`));
    chart(where, `Bars: calls, and cold calls among them, for each ${every}. The same numbers are in the table below.`, 170, {
      axes: axes((v) => (Number.isInteger(v) ? many(v) : "")),
      series: [xSeries,
        { label: "calls", fill: () => css("unattributed"), stroke: () => css("unattributed"), width: 0, paths: bars, points: { show: false }, value: (u, v) => (v === null ? "" : many(v)) },
        { label: "opened a connection", fill: () => css("handshake"), stroke: () => css("handshake"), width: 0, paths: bars, points: { show: false }, value: (u, v) => (v === null ? "" : many(v)) }],
      scales: { y: { range: (u, low, high) => [0, Math.max(1, high) * 1.05] } },
    }, [x, spread(b, b.calls), spread(b, b.cold)]);
    where.append(asTable("Calls over time", ["calls", "opened a connection"], () => b.index.map((bucket, k) => [when(bucket), many(b.calls[k]), many(b.cold[k])])));
    where.append(h("p", { class: "note" }, "Drag over a chart to look closer, double-click to go back."));
    if (DATA.timeless) where.append(h("p", { class: "note" }, `${many(DATA.timeless)} calls have no time of day and are not in these charts.`));
  }

  // --- by endpoint and model ------------------------------------------------------------------------------------------

  const inFilter = (e, m) => (state.endpoint === ALL || state.endpoint === e) && (state.model === ALL || state.model === m);
  function drawPairs() {
    const rows = [];
    DATA.endpoints.forEach((endpoint, e) => DATA.models.forEach((model, m) => {
      const s = inFilter(e, m) ? select(e, m, state.outcome) : null;
      if (s) rows.push([s, endpoint, model]);
    }));
    rows.sort((a, b) => b[0].calls - a[0].calls);
    const g = { class: "group" };
    replace("pairs", table("Times of calls; blank where unknown, or where there are too few calls for a percentile.",
      [[th("Endpoint", { class: "l", rowspan: 2 }), th("Model", { class: "l", rowspan: 2 }), th("Calls", { rowspan: 2 }), th("Time to first token", { colspan: 3, ...g }), th("Inter-token latency", { colspan: 2, ...g }), th("Tokens/s", { colspan: 1, ...g }), th("Whole call", { colspan: 3, ...g }), th("Re-used", { rowspan: 2, ...g })],
        [th("median", g), th("p95"), th("p99"), th("median", g), th("p95"), th("median", g), th("median", g), th("p95"), th("p99")]],
      rows.map(([s, endpoint, model]) => {
        const t = s.times;
        return h("tr", {}, h("th", { scope: "row", title: endpoint }, named(endpoint)), td(named(model), { class: "l", title: model }), td(many(s.calls)),
          td(time(at(t.first_content, "p50")), g), td(time(at(t.first_content, "p95"))), td(time(at(t.first_content, "p99"))),
          td(time(at(t.inter_token, "p50")), g), td(time(at(t.inter_token, "p95"))), td(number(at(t.tokens_per_s, "p50")), g),
          td(time(at(t.total, "p50")), g), td(time(at(t.total, "p95"))), td(time(at(t.total, "p99"))),
          td(s.cold + s.warm ? percent(s.warm / (s.cold + s.warm)) : "", g));
      })));
  }

  // --- cold against warm ----------------------------------------------------------------------------------------------

  function drawCold(s) {
    if (!s.cold && !s.warm) { replace("cold", h("p", { class: "note" }, "Nothing is known about the connections of these calls.")); return; }
    const g = { class: "group" };
    const rows = [["first_content", "Time to first token"], ["total", "Whole call"], ["handshake", "Handshake"]].filter(([name]) => s.cold_times[name] || s.warm_times[name]);
    const known = s.cold + s.warm;
    replace("cold",
      h("div", { class: "bar", role: "img", "aria-label": `${percent(s.cold / known)} of calls were cold, ${percent(s.warm / known)} warm` },
        h("span", { class: "handshake", width: `${(100 * s.cold) / known}%` }), h("span", { class: "unattributed", width: `${(100 * s.warm) / known}%` })),
      h("ul", { class: "legend" }, h("li", {}, dot("handshake"), `cold: ${many(s.cold)} calls (${percent(s.cold / known)})`), h("li", {}, dot("unattributed"), `warm: ${many(s.warm)} calls (${percent(s.warm / known)})`)),
      table("Calls that made a connection, beside calls on one that was there.",
        [[th("", { rowspan: 2 }), th("Cold", { colspan: 3, ...g }), th("Warm", { colspan: 3, ...g }), th("Median, cold less warm", { rowspan: 2, ...g })],
          [th("calls", g), th("median"), th("p95"), th("calls", g), th("median"), th("p95")]],
        rows.map(([name, label]) => {
          const [c, w] = [s.cold_times[name], s.warm_times[name]];
          const gap = c && w ? at(c, "p50") - at(w, "p50") : null;
          return h("tr", {}, h("th", { scope: "row" }, label), td(c ? many(at(c, "n")) : "", g), td(time(at(c, "p50"))), td(time(at(c, "p95"))), td(w ? many(at(w, "n")) : "", g), td(time(at(w, "p50"))), td(time(at(w, "p95"))),
            td(gap === null ? "" : `${gap < 0 ? "−" : "+"}${time(Math.abs(gap))}`, g));
        })),
      h("p", { class: "note" }, "Calls differ in more than their connection: where cold calls are of another hour, endpoint or length, so is the difference."));
  }

  // --- outcomes -------------------------------------------------------------------------------------------------------

  function drawOutcomes() {
    const s = select(state.endpoint, state.model, ALL);
    if (!s) { replace("outcomes"); return; }
    const errors = Object.entries(s.errors);
    replace("outcomes",
      table(`All ${many(s.calls)} calls of this endpoint and model, whatever their outcome.`, [[th("Outcome", { class: "l" }), th("Calls"), th("Share"), th("Median of the whole call")]],
        Object.entries(s.outcomes).map(([name, count]) => {
          const own = select(state.endpoint, state.model, DATA.outcomes.indexOf(name));
          return h("tr", {}, h("th", { scope: "row", class: name === "error" || name === "timeout" ? "bad" : null }, word(name)), td(many(count)), td(percent(count / s.calls)), td(own ? time(at(own.times.total, "p50")) : ""));
        })),
      errors.length ? h("h3", {}, "Errors") : null,
      errors.length ? table("By class of the error that ended the call.", [[th("Error", { class: "l" }), th("Calls"), th("Share")]],
        errors.map(([name, count]) => h("tr", {}, h("th", { scope: "row" }, name), td(many(count)), td(percent(count / s.calls))))) : null,
      s.retried ? h("p", { class: "note" }, `${many(s.retried)} calls were tried more than once.`) : null);
  }

  // --- single calls ---------------------------------------------------------------------------------------------------

  function waterfall(call) {
    const pieces = DATA.pieces[call.pieces];
    let begin = 0;
    const rows = pieces.map(([segment, part, source], i) => {
      const s = call.durations[i] / 1e6;
      const left = begin;
      begin += s;
      return h("tr", {}, h("th", { scope: "row" }, dot(segment), `${segment} ${word(part)}`.trim()), td(time(s)),
        h("td", { class: "track" }, h("div", { class: "bar" }, h("span", { class: `${segment} ${source}`, margin: `min(${(100 * left) / call.total}%, calc(100% - 2px))`, width: `${(100 * s) / call.total}%` }))), td(source, { class: "l" }));
    });
    const facts = [
      call.first !== null ? `first content after ${time(call.first)}` : null,
      call.cold === null ? null : call.cold ? "new connection" : "connection re-used",
      call.attempts > 1 ? `${call.attempts} attempts` : null,
      call.output !== null ? `${many(call.output)} tokens out${call.input !== null ? `, ${many(call.input)} in` : ""}${call.cached ? ` (${many(call.cached)} cached)` : ""}` : null,
      `${call.operation || "call"}${call.transport ? ` over ${call.transport}` : ""}`,
      call.trace ? `trace ${call.trace}` : null,
    ].filter(Boolean).join("; ");
    return h("div", { class: "inner" }, h("p", { class: "note" }, facts),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Waterfall" },
        h("table", { class: "fall" }, h("thead", {}, h("tr", {}, th("Part", { class: "l" }), th("Time"), th(`0 to ${time(call.total)}`, { class: "l" }), th("Source", { class: "l" }))), h("tbody", {}, rows))));
  }
  function line(call) {
    const outcome = DATA.outcomes[call.outcome];
    const bad = outcome === "error" || outcome === "timeout";
    const sums = {};
    DATA.pieces[call.pieces].forEach(([segment], i) => { sums[segment] = (sums[segment] || 0) + call.durations[i]; });
    const details = h("details", { class: "call" }, h("summary", {},
      h("span", { class: "when" }, call.started === null ? "" : stamp(call.started, true).slice(5)),
      h("span", { class: "who", title: `${call.modelName} at ${call.endpointName}` }, named(call.modelName), " ", h("small", {}, named(call.endpointName))),
      h("span", { class: "ends" }, h("span", { class: `badge${bad ? " bad" : ""}` }, call.error || word(outcome)), call.cold ? h("span", { class: "badge" }, "cold") : null),
      h("span", { class: "ms" }, time(state.order === "first" && call.first !== null ? call.first : call.total)),
      h("span", { class: "bar thin", role: "img", "aria-label": Object.entries(sums).map(([k, v]) => `${k} ${time(v / 1e6)}`).join(", ") },
        SEGMENTS.filter((name) => sums[name]).map((name) => h("span", { class: name, width: `${sums[name] / call.total / 1e4}%` })))));
    details.addEventListener("toggle", () => { if (details.open && details.children.length === 1) details.append(waterfall(call)); });
    return details;
  }
  function drawCalls() {
    const some = DATA.calls.filter((call) => call.kind & state.kind && inFilter(call.endpoint, call.model) && (state.outcome === ALL || call.outcome === state.outcome));
    if (state.kind === 1) {
      const key = state.order === "first" ? (call) => call.first ?? -1 : (call) => call.total;
      some.sort((a, b) => key(b) - key(a));
    }
    const press = (text, on, change) => h("button", { type: "button", "aria-pressed": String(on), onclick: () => { Object.assign(state, change, { shown: 20 }); drawCalls(); } }, text);
    const rows = some.slice(0, state.shown).map(line);
    replace("calls",
      h("div", { class: "modes", role: "group", "aria-label": "Which calls" },
        press("Slowest", state.kind === 1 && state.order === "total", { kind: 1, order: "total" }),
        press("Slowest to the first token", state.kind === 1 && state.order === "first", { kind: 1, order: "first" }),
        press("A sample over time", state.kind === 2, { kind: 2, order: "total" })),
      h("ul", { class: "legend" }, SEGMENTS.map((name) => h("li", {}, dot(name), name)), h("li", {}, h("span", { class: "dot unattributed" }), "measured"), h("li", {}, h("span", { class: "dot unattributed reported" }), "reported"), h("li", {}, h("span", { class: "dot unattributed estimated" }), "estimated")),
      some.length ? h("div", { class: "list" }, rows) : h("p", { class: "note" }, "None of the calls that are drawn here fits the filters."),
      some.length > state.shown ? h("p", {}, h("button", { type: "button", onclick: () => { state.shown += 50; drawCalls(); } }, `Show more (${many(some.length - state.shown)})`)) : null,
      h("p", { class: "note" }, "Open a call to see its waterfall. Parts are in the order in which they happen; each bar begins where the one before ended. The slowest calls of every endpoint, model and outcome are here, and every n-th call as a sample."));
    const first = body("calls").querySelector("details.call");
    if (first) first.open = true;
  }

  // --- all ------------------------------------------------------------------------------------------------------------

  function render() {
    const s = current();
    const every = select(ALL, ALL, ALL);
    output.textContent = `${many(s ? s.calls : 0)} of ${many(every.calls)} calls`;
    for (const id of ["tiles", "where", "time", "pairs", "cold"]) document.getElementById(id).hidden = !s;
    if (s) { drawTiles(s); drawWhere(s); drawPairs(); drawCold(s); }
    drawTime();
    drawOutcomes();
    drawCalls();
  }
  let pending = 0;
  addEventListener("resize", () => { cancelAnimationFrame(pending); pending = requestAnimationFrame(() => charts.forEach(({ resize }) => resize())); });
  render();
  root.dataset.ready = "true";
})();
