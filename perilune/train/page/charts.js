"use strict";
// The charts of a run report, drawn as SVG (heat maps on canvas) at the width of their place. No library, no network.
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const NS = document.querySelector("svg").namespaceURI;
  const tip = document.getElementById("tip");
  let axis = "tokens";

  // --- elements, numbers, scales -------------------------------------------------------------------------------

  const el = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS(NS, tag);
    for (const [k, v] of Object.entries(attributes)) if (v !== undefined) node.setAttribute(k, v);
    node.append(...children);
    return node;
  };
  const html = (tag, className, ...children) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    node.append(...children);
    return node;
  };
  const finite = (v) => v !== null && v !== undefined && Number.isFinite(v);
  const short = (v) => {
    const a = Math.abs(v);
    for (const [unit, n] of [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]]) if (a >= n) return +(v / n).toPrecision(3) + unit;
    return a === 0 ? "0" : a < 1e-3 ? v.toExponential(1).replace("e-", "e−") : String(+v.toPrecision(3));
  };
  const percent = (v) => +(100 * v).toPrecision(3) + "%";
  const clock = (s) => (s >= 3600 ? +(s / 3600).toFixed(1) + " h" : s >= 60 ? +(s / 60).toFixed(1) + " min" : Math.round(s) + " s");
  const AXES = {
    step: { name: "step", format: (v) => (v >= 1e4 ? short(v) : String(Math.round(v))) },
    tokens: { name: "tokens", format: short },
    seconds: { name: "time", format: clock },
  };
  const extent = (values) => {
    let low = Infinity, high = -Infinity;
    for (const v of values) if (finite(v)) { if (v < low) low = v; if (v > high) high = v; }
    return [low, high];
  };
  const niceStep = (span, wanted) => {
    const raw = span / Math.max(1, wanted), power = 10 ** Math.floor(Math.log10(raw));
    return power * [1, 2, 5, 10].find((m) => m * power >= raw * 0.999);
  };
  const linear = ([a, b], [p, q]) => {
    const s = (v) => p + ((v - a) / (b - a || 1)) * (q - p);
    s.inverse = (x) => a + ((x - p) / (q - p)) * (b - a);
    s.ticks = (n) => {
      const step = niceStep(b - a || 1, n), out = [];
      for (let v = Math.ceil(a / step - 1e-9) * step; v <= b + step * 1e-9; v += step) out.push(+v.toPrecision(12));
      return out;
    };
    return s;
  };
  const logarithmic = ([a, b], range) => {
    const inner = linear([Math.log10(a), Math.log10(b)], range);
    const s = (v) => inner(Math.log10(v));
    s.inverse = (x) => 10 ** inner.inverse(x);
    s.ticks = (n) => {
      const low = Math.log10(a), high = Math.log10(b), out = [];
      const every = Math.max(1, Math.ceil((high - low) / n)), marks = high - low < 1.5 ? [1, 2, 5] : [1];
      for (let p = Math.floor(low); p <= high; p += every) for (const m of marks) {
        const v = m * 10 ** p;
        if (v >= a * 0.999 && v <= b * 1.001) out.push(v);
      }
      return out;
    };
    return s;
  };

  // Depth has one ramp everywhere: shallow layers amber, deep ones blue.
  const depth = (i, n) => {
    const t = n < 2 ? 0 : i / (n - 1);
    const [a, b, u] = t < 0.5 ? ["shallow", "middle", 2 * t] : ["middle", "deep", 2 * t - 1];
    return `color-mix(in oklab, var(--${b}) ${Math.round(100 * u)}%, var(--${a}))`;
  };

  // --- tooltip -------------------------------------------------------------------------------------------------

  const show = (event, text) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect(), gap = 14;
    const x = event.clientX + gap + box.width > innerWidth ? event.clientX - gap - box.width : event.clientX + gap;
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, Math.min(innerHeight - box.height - 4, event.clientY - box.height - gap)) + "px";
  };
  const hide = () => { tip.hidden = true; };

  // --- line chart ----------------------------------------------------------------------------------------------
  // series: {name, x, y, color, width, opacity, dots, quiet (not in the tooltip), scale (not on the y extent)}

  const path = (xs, ys, sx, sy) => {
    let d = "", pen = "M";
    for (let i = 0; i < xs.length; i++) {
      if (!finite(ys[i]) || !finite(xs[i])) { pen = "M"; continue; }
      d += pen + sx(xs[i]).toFixed(1) + " " + sy(ys[i]).toFixed(1);
      pen = "L";
    }
    return d;
  };
  const nearest = (xs, x) => {
    let a = 0, b = xs.length - 1;
    while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
    return b < 0 ? -1 : Math.abs(xs[a] - x) <= Math.abs(xs[b] - x) ? a : b;
  };

  function lineChart(place, series, { height = 240, log = false, format = short, xAxis = AXES.step, domain, zero = false } = {}) {
    const shown = series.filter((s) => s.y.some(finite));
    place.replaceChildren();
    if (!shown.length) { place.append(html("p", "absent", "Not recorded in this run.")); return; }
    const width = place.clientWidth, pad = { left: 40, right: 10, top: 8, bottom: 24 };
    let [low, high] = domain || extent(shown.filter((s) => !s.loose).flatMap((s) => s.y).filter((v) => !log || v > 0));
    if (zero) low = Math.min(0, low);
    if (!domain) {
      if (log) { low /= 1.15; high *= 1.15; }
      else { const room = (high - low || Math.abs(high) || 1) * 0.05; if (!zero || low < 0) low -= room; high += room; }
    }
    const xs = extent(shown.flatMap((s) => s.x));
    if (xs[0] > 0 && xs[0] < 0.05 * xs[1]) xs[0] = 0;
    const sx = linear(xs, [pad.left, width - pad.right]);
    const sy = (log ? logarithmic : linear)([low, high], [height - pad.bottom, pad.top]);
    const svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (const v of sy.ticks(height / 50)) {
      svg.append(el("line", { class: "grid", x1: pad.left, x2: width - pad.right, y1: sy(v), y2: sy(v) }));
      svg.append(el("text", { x: pad.left - 6, y: sy(v) + 3.5, "text-anchor": "end" }, format(v)));
    }
    svg.append(el("line", { class: "base", x1: pad.left, x2: width - pad.right, y1: height - pad.bottom, y2: height - pad.bottom }));
    const ticks = sx.ticks(Math.max(2, (width - pad.left) / 110));
    ticks.forEach((v, i) => {
      const last = i === ticks.length - 1 && sx(v) > width - 34;
      svg.append(el("text", { x: last ? width - pad.right : sx(v), y: height - 7, "text-anchor": last ? "end" : "middle" }, xAxis.format(v)));
    });
    const clip = "c" + Math.random().toString(36).slice(2);
    svg.append(el("clipPath", { id: clip }, el("rect", { x: pad.left - 4, y: 0, width: width - pad.left - pad.right + 10, height: height - pad.bottom + 3 })));
    const inside = el("g", { "clip-path": `url(#${clip})` });
    svg.append(inside);
    for (const s of shown) {
      if (s.dots) {
        s.x.forEach((x, i) => finite(s.y[i]) && inside.append(el("circle", { cx: sx(x), cy: sy(s.y[i]), r: 3, style: `fill:var(--paper);stroke:${s.color};stroke-width:1.6` })));
      } else {
        inside.append(el("path", { class: "line", d: path(s.x, s.y, sx, sy), style: `stroke:${s.color};stroke-width:${s.width || 1.6};opacity:${s.opacity || 1}` }));
      }
    }
    const cross = el("line", { class: "cross", y1: pad.top, y2: height - pad.bottom, visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("pointermove", (event) => {
      const x = sx.inverse(event.clientX - svg.getBoundingClientRect().left);
      const rows = [];
      let at = null;
      for (const s of shown.filter((s) => !s.quiet)) {
        const i = nearest(s.x, x);
        if (i < 0 || !finite(s.y[i])) continue;
        if (at === null) at = s.x[i];
        rows.push(`${s.name ? s.name + "  " : ""}${format(s.y[i])}`);
      }
      if (at === null) return;
      cross.setAttribute("x1", sx(at)); cross.setAttribute("x2", sx(at)); cross.setAttribute("visibility", "visible");
      show(event, `${xAxis.name} ${xAxis.format(at)}\n${rows.slice(0, 16).join("\n")}`);
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); hide(); });
    place.append(svg);
  }

  // --- learning and optimisation ---------------------------------------------------------------------------------

  const color = (i) => `var(--r${i % 6})`;

  function learning(place, key) {
    const series = [], main = DATA.runs[0];
    // The first steps fall from ln V; a scale that shows them hides the rest, so it starts where 10% of the run is done.
    const values = DATA.runs.flatMap((r) => [...r[key + "_smooth"].slice(Math.floor(r.step.length * 0.1)), ...(key === "bpb" ? r.held_out.val_bpb.slice(-1) : [])]);
    DATA.runs.forEach((r, i) => {
      if (i) series.unshift({ name: r.name, x: r[axis], y: r[key + "_smooth"], color: color(i), width: 1.3 });
      if (i && key === "bpb") series.unshift({ name: r.name + " held-out", quiet: true, x: r.held_out[axis], y: r.held_out.val_bpb, color: color(i), width: 1, opacity: 0.6 });
    });
    series.push({ quiet: true, x: main[axis], y: main[key], color: color(0), width: 0.8, opacity: 0.28 });
    series.push({ name: main.name, x: main[axis], y: main[key + "_smooth"], color: color(0), width: 2 });
    if (key === "bpb") series.push({ name: "held-out", x: main.held_out[axis], y: main.held_out.val_bpb, color: color(0), dots: true });
    const [low, high] = extent(values), room = (high - low || 1) * 0.06;
    lineChart(place, series, { xAxis: AXES[axis], height: 280, domain: [low - room, high + room], format: (v) => String(+v.toFixed(3)) });
  }

  function scalar(place, key) {
    const y = DATA.scalars[key];
    lineChart(place, [{ name: "", x: DATA.steps, y, color: color(0), width: 1.4 }], { height: 150, log: key === "grad_norm", zero: key !== "grad_norm" });
  }

  function byLayer(place, source, key, options) {
    const d = DATA[source];
    if (!d) return;
    const n = d.layers.length;
    lineChart(place, d.layers.map((layer, i) => ({ name: "layer " + layer, x: d.steps, y: d[key][i], color: depth(i, n), width: 1.4 })), options);
  }

  // --- expert loads ------------------------------------------------------------------------------------------------

  const rgb = (name) => {
    const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };

  function loadMaps() {
    const place = document.getElementById("load-maps"), d = DATA.loads;
    if (!place || !d) return;
    const [under, even, over, dead] = ["--under", "--even", "--over", "--dead"].map(rgb);
    const paint = (v) => {
      if (v === 0) return dead;
      const t = Math.max(-1, Math.min(1, Math.log2(v) / 2)), to = t < 0 ? under : over;
      return even.map((c, i) => c + (to[i] - c) * Math.abs(t));
    };
    place.replaceChildren();
    d.layers.forEach((layer, l) => {
      const rows = d.relative[l], columns = d.steps.length;
      const canvas = html("canvas");
      canvas.width = columns; canvas.height = rows.length;
      canvas.style.height = Math.max(72, Math.min(160, rows.length * 6)) + "px";
      const context = canvas.getContext("2d"), image = context.createImageData(columns, rows.length);
      rows.forEach((row, e) => row.forEach((v, t) => image.data.set([...(finite(v) ? paint(v) : even), 255], 4 * (e * columns + t))));
      context.putImageData(image, 0, 0);
      canvas.addEventListener("pointermove", (event) => {
        const box = canvas.getBoundingClientRect();
        const t = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
        const e = Math.min(rows.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows.length)));
        show(event, `layer ${layer}, expert ${e}\nstep ${d.steps[t]}: ${finite(rows[e][t]) ? rows[e][t] : "?"} × even share`);
      });
      canvas.addEventListener("pointerleave", hide);
      const [low, high] = extent(rows.map((row) => row[columns - 1]));
      place.append(html("figure", "", html("figcaption", "", `layer ${layer} `, html("span", "", `${rows.length} experts, ${low.toFixed(2)}–${high.toFixed(2)} ×`)), canvas,
        html("div", "ends", html("span", "", "step " + d.steps[0]), html("span", "", String(d.steps[columns - 1])))));
    });
    document.getElementById("load-key").replaceChildren("¼ ×", html("i"), "4 ×", html("b"), "none");
  }

  // --- KDA retention -------------------------------------------------------------------------------------------------

  const sorted = (values) => Float64Array.from(values).sort();
  const quantile = (s, p) => s[Math.min(s.length - 1, Math.round(p * (s.length - 1)))];

  function density(values, low, high, bins) {
    const out = new Float64Array(bins), logs = values.map(Math.log10);
    const mean = logs.reduce((a, b) => a + b, 0) / logs.length;
    const sd = Math.sqrt(logs.reduce((a, b) => a + (b - mean) ** 2, 0) / logs.length) || 0.1;
    const width = Math.max(0.06, 0.9 * sd * logs.length ** -0.2);
    for (let i = 0; i < bins; i++) {
      const x = low + (i / (bins - 1)) * (high - low);
      for (const v of logs) out[i] += Math.exp(-0.5 * ((x - v) / width) ** 2);
      out[i] /= logs.length * width;
    }
    return out;
  }

  function ridges(place) {
    const d = DATA.retention;
    if (!d) return;
    place.replaceChildren();
    const n = d.layers.length, width = place.clientWidth, left = 54, right = 84, row = n > 12 ? 26 : n > 4 ? 44 : 58, rise = row * 1.35;
    const all = [...d.last, ...d.first].flat(2), [a, b] = extent(all).map(Math.log10);
    const low = Math.floor(a * 2 - 0.3) / 2, high = Math.ceil(b * 2 + 0.3) / 2, bins = 160;
    const height = rise + n * row + 26, sx = logarithmic([10 ** low, 10 ** high], [left, width - right]);
    const svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    for (const v of sx.ticks((width - left - right) / 60)) {
      svg.append(el("line", { class: "grid", x1: sx(v), x2: sx(v), y1: 6, y2: height - 22 }));
      svg.append(el("text", { x: sx(v), y: height - 7, "text-anchor": "middle" }, short(v)));
    }
    const last = d.last.map((heads) => density(heads.flat(), low, high, bins)), first = d.first.map((heads) => density(heads.flat(), low, high, bins));
    const top = Math.max(...last.map((r) => Math.max(...r)), ...first.map((r) => Math.max(...r)));
    const at = (i) => left + (i / (bins - 1)) * (width - left - right);
    d.layers.forEach((layer, l) => {
      const base = rise + l * row + row * 0.5, y = (v) => (base - (v / top) * rise).toFixed(1);
      const outline = (r) => Array.from(r, (v, i) => `${i ? "L" : "M"}${at(i).toFixed(1)} ${y(v)}`).join("");
      const c = depth(l, n), life = sorted(d.last[l].flat()), m = quantile(life, 0.5);
      const group = el("g", {});
      group.append(el("path", { d: `${outline(last[l])}L${at(bins - 1)} ${base}L${left} ${base}Z`, style: `fill:${c};opacity:.30` }));
      group.append(el("path", { class: "line", d: outline(last[l]), style: `stroke:${c};stroke-width:1.5` }));
      group.append(el("path", { class: "line", d: outline(first[l]), style: "stroke:var(--faint);stroke-width:1;stroke-dasharray:2 3" }));
      group.append(el("line", { class: "base", x1: left, x2: width - right, y1: base, y2: base }));
      d.last[l].forEach((head) => { const x = sx(quantile(sorted(head), 0.5)); group.append(el("line", { x1: x, x2: x, y1: base + 2, y2: base + 8, style: `stroke:${c};stroke-width:1.5` })); });
      group.append(el("text", { class: "name", x: left - 8, y: base, "text-anchor": "end" }, "layer " + layer));
      group.append(el("text", { class: "name", x: width - right + 8, y: base }, short(m) + " tokens"));
      group.addEventListener("pointermove", (event) => show(event, `layer ${layer}: half-life in tokens\n10% ${short(quantile(life, 0.1))}   median ${short(m)}   90% ${short(quantile(life, 0.9))}\n` +
        d.last[l].slice(0, 16).map((head, h) => `head ${h}: ${short(quantile(sorted(head), 0.5))}`).join("\n")));
      group.addEventListener("pointerleave", hide);
      svg.append(group);
    });
    svg.append(el("text", { x: width - right + 8, y: 14 }, "median"));
    place.append(svg);
  }

  // --- Attention Residuals ---------------------------------------------------------------------------------------------

  let moment = -1;

  function attnRes(place) {
    const d = DATA.attn_res;
    if (!d) return;
    place.replaceChildren();
    const weights = d.weights[moment < 0 ? d.weights.length - 1 : moment], columns = Math.max(...weights.map((r) => r.length));
    const left = 118, width = place.clientWidth, wide = Math.max(6, Math.min(92, (width - left) / columns)), tall = weights.length > 60 ? 9 : weights.length > 24 ? 15 : 23;
    const height = 24 + tall * weights.length + 4, svg = el("svg", { height, viewBox: `0 0 ${width} ${height}`, role: "img" });
    const source = (j) => (j === 0 ? "embedding" : d.full ? "sublayer " + (j - 1) : "block " + j);
    for (let j = 0; j < columns; j++) {
      const name = wide > 64 ? source(j) : j === 0 ? "emb" : String(d.full ? j - 1 : j);
      if (wide > 20 || j % 5 === 0) svg.append(el("text", { x: left + (j + 0.5) * wide, y: 14, "text-anchor": "middle" }, name));
    }
    weights.forEach((row, i) => {
      const y = 24 + i * tall;
      if (tall > 12 || i % 4 === 0) svg.append(el("text", { class: "name", x: left - 10, y: y + tall / 2 + 4, "text-anchor": "end" }, d.reads[i] || ""));
      row.forEach((w, j) => {
        const open = j === row.length - 1;
        const cell = el("rect", { class: "cell", x: left + j * wide, y, width: wide, height: tall, rx: 2, style: `fill:color-mix(in oklab, var(--weight) ${Math.round(100 * Math.min(1, w) ** 0.75)}%, var(--even))` });
        cell.addEventListener("pointermove", (event) => show(event, `${d.reads[i]} reads ${source(j)}${open ? " (open)" : ""}\n${(100 * w).toFixed(1)}%, uniform would be ${(100 / row.length).toFixed(1)}%`));
        cell.addEventListener("pointerleave", hide);
        svg.append(cell);
        if (open) svg.append(el("rect", { x: left + j * wide + 1.5, y: y + 1.5, width: wide - 3, height: tall - 3, rx: 1.5, style: "fill:none;stroke:var(--faint);stroke-width:1;pointer-events:none" }));
        if (wide > 34 && tall > 18) svg.append(el("text", { x: left + (j + 0.5) * wide, y: y + tall / 2 + 4, "text-anchor": "middle", style: `pointer-events:none;fill:${w > 0.42 ? "var(--paper)" : "var(--ink)"}` }, w.toFixed(2).replace(/^0/, "")));
      });
    });
    place.append(svg);
  }

  // --- the page --------------------------------------------------------------------------------------------------------

  const DRAW = {
    loss: (p) => learning(p, "loss"),
    bpb: (p) => learning(p, "bpb"),
    ...Object.fromEntries(Object.keys(DATA.scalars).map((key) => [key, (p) => scalar(p, key)])),
    max_violation: (p) => byLayer(p, "balance", "max_violation", { height: 190, zero: true }),
    dead: (p) => byLayer(p, "balance", "dead", { height: 190, zero: true, format: percent }),
    retention: (p) => byLayer(p, "retention", "median", { height: 240, log: true }),
    ridges,
    attn_res: attnRes,
  };
  const draw = (place) => DRAW[place.dataset.chart](place);
  const places = [...document.querySelectorAll("[data-chart]")];

  document.getElementById("run-legend").append(...DATA.runs.map((r, i) => html("li", "", html("i", `swatch r${i % 6}`), r.name)));
  for (const list of document.querySelectorAll("[data-depth]")) {
    const layers = DATA[list.dataset.depth].layers;
    list.append("layer " + layers[0], html("span", "ramp"), String(layers[layers.length - 1]));
  }
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => {
      axis = button.dataset.axis;
      document.querySelectorAll("[data-axis]").forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
      places.filter((p) => ["loss", "bpb"].includes(p.dataset.chart)).forEach(draw);
    });
  }
  const time = document.getElementById("depth-time");
  if (time) {
    const steps = DATA.attn_res.steps, range = time.querySelector("input"), output = time.querySelector("output");
    range.max = steps.length - 1; range.value = steps.length - 1; output.textContent = steps[steps.length - 1];
    range.addEventListener("input", () => {
      moment = +range.value; output.textContent = steps[moment];
      draw(places.find((p) => p.dataset.chart === "attn_res"));
    });
  }
  const widths = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (widths.get(target) === target.clientWidth) continue;
      widths.set(target, target.clientWidth);
      draw(target);
    }
  });
  places.forEach((place) => observer.observe(place));
  loadMaps();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", loadMaps);
})();
