// Three small line charts of the last two minutes, and the memory bar.

const SPAN_S = 120;
const SVG = "http://www.w3.org/2000/svg";

export function formatBytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  }
  return `${Math.round(n)} B`;
}

function element(name, parent, attributes = {}) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent.append(made);
  return made;
}

export class Chart {
  // `format` makes text of a value; `top` is the fixed upper end of the axis, if it has one.
  constructor(root, title, format, top = null) {
    this.title = title;
    this.format = format;
    this.top = top;
    this.points = []; // [seconds, value or null]
    const heading = document.createElement("h3");
    heading.textContent = title;
    this.output = document.createElement("strong"); // not an output, which is read aloud at each change
    this.output.textContent = "–";
    this.svg = element("svg", root, {
      viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": title,
    });
    element("line", this.svg, { class: "axis", x1: 0, x2: 100, y1: 40, y2: 40 });
    this.area = element("path", this.svg, { class: "area" });
    this.line = element("path", this.svg, { class: "line" });
    const range = document.createElement("div");
    range.className = "range";
    const from = document.createElement("span");
    from.textContent = "2 min";
    this.most = document.createElement("span");
    range.append(from, this.most);
    root.replaceChildren(heading, this.output, this.svg, range);
  }

  add(time, value) {
    this.points.push([time, value]);
    while (this.points[0][0] < time - SPAN_S) this.points.shift();
    const known = this.points.map((p) => p[1]).filter((v) => v !== null);
    const last = known.at(-1) ?? null;
    const top = this.top ?? Math.max(...known, 1e-9);
    this.output.textContent = last === null ? "–" : this.format(last);
    this.most.textContent = known.length ? `top ${this.format(top)}` : "";
    this.svg.setAttribute("aria-label", `${this.title}: ${this.output.textContent}`);
    let line = "";
    let area = "";
    let run = [];
    const end = () => {
      if (run.length) {
        line += `M${run.join("L")}`;
        area += `M${run[0].split(" ")[0]} 40L${run.join("L")}L${run.at(-1).split(" ")[0]} 40Z`;
      }
      run = [];
    };
    for (const [when, v] of this.points) {
      if (v === null) end();
      else run.push(`${(100 * (1 - (time - when) / SPAN_S)).toFixed(2)} ${(40 - 38 * (v / top)).toFixed(2)}`);
    }
    end();
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
  }
}

const USES = [
  ["shared", "shared weights"],
  ["slots", "experts"],
  ["kv", "KV cache"],
  ["prefill", "reading prompts"],
  ["mlx_cache", "MLX buffers"],
  ["base", "the process"],
];

export class MemoryBar {
  constructor(root, legend, now, planned) {
    Object.assign(this, { root, legend, now, planned, plan: null });
  }

  setPlan(plan) {
    this.plan = plan;
    this.root.replaceChildren();
    this.legend.replaceChildren();
    if (!plan) {
      this.planned.textContent = "";
      return;
    }
    this.planned.textContent = `of ${formatBytes(plan.total)} planned`;
    this.parts = [];
    for (const [name, text] of USES) {
      if (!plan[name]) continue;
      const part = document.createElement("div");
      part.className = `part is-${name}`;
      this.parts.push([part, plan[name]]);
      this.root.append(part);
      this.addLegend(`is-${name}`, `${text} ${formatBytes(plan[name])}`);
    }
    this.mark = document.createElement("div");
    this.mark.className = "now";
    this.root.append(this.mark);
    this.addLegend("is-now", "in use now");
  }

  addLegend(kind, text) {
    const item = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = `swatch ${kind}`;
    item.append(swatch, text);
    this.legend.append(item);
  }

  show(nbytes) {
    this.now.textContent = formatBytes(nbytes);
    if (!this.plan) return;
    const whole = Math.max(this.plan.total, nbytes);
    for (const [part, size] of this.parts) part.style.width = `${(100 * size) / whole}%`;
    this.mark.style.left = `${(100 * nbytes) / whole}%`;
    this.root.setAttribute(
      "aria-label",
      `${formatBytes(nbytes)} in use, ${formatBytes(this.plan.total)} planned`,
    );
  }
}
