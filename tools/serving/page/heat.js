// The heat map: a cell for each expert of each layer. It glows when used and cools down after.

const HALF_LIFE_MS = 800;
const FRAME_MS = 100; // smooth enough, and the processor is the model's
const DARK = 0.02; // less glow than this is none
const TALLEST_PX = 420; // of the map, where cells need not be taller to be seen
const CELL_PX = { least: 3, most: 22 };
const NARROW_PX = 4; // where cells would be narrower, layers go across
const MARKED_PX = 9; // cells of this height have room for a mark at their foot

function rgb(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
}

function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
}

export class HeatMap {
  constructor(canvas, axes, cell, summary) {
    Object.assign(this, { canvas, axes, cell, summary });
    this.context = canvas.getContext("2d");
    this.pixels = document.createElement("canvas"); // one pixel a cell, drawn large
    this.modules = [];
    this.cursor = null;
    this.isStill = matchMedia("(prefers-reduced-motion: reduce)");
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", () => this.readColours());
    new ResizeObserver(() => this.layOut()).observe(canvas.parentElement);
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("blur", () => { this.cursor = null; this.draw(); });
    this.readColours();
  }

  readColours() {
    this.colours = { absent: rgb("--absent"), resident: rgb("--resident"), used: rgb("--used"), mark: rgb("--mark") };
    this.ground = `rgb(${rgb("--card")})`;
    this.ink = `rgb(${rgb("--text")})`;
    this.draw();
  }

  setModules(modules) {
    this.modules = modules;
    this.starts = [];
    let n = 0;
    for (const module of modules) {
      this.starts.push(n);
      n += module.experts;
    }
    this.widest = Math.max(0, ...modules.map((module) => module.experts));
    this.glow = new Float32Array(n);
    this.total = new Float64Array(n);
    this.residents = new Uint8Array(n);
    this.cooledAt = performance.now();
    this.cursor = null;
    const slots = modules.reduce((sum, module) => sum + module.slots, 0);
    this.summary.textContent = n
      ? `${modules.length} layers × ${this.widest}, room for ${slots} of ${n} in memory`
      : "";
    this.layOut();
  }

  // Counts and bits as the server sends them, or null where nothing changed.
  update(uses, residents) {
    this.cool();
    if (uses) {
      const counts = bytesOf(uses);
      for (let i = 0; i < counts.length; i++) {
        if (!counts[i]) continue;
        this.total[i] += counts[i];
        this.glow[i] = Math.min(1, this.glow[i] + 0.4 + 0.1 * Math.log2(counts[i]));
      }
    }
    if (residents) {
      const bits = bytesOf(residents);
      for (let i = 0; i < this.residents.length; i++) {
        this.residents[i] = (bits[i >> 3] >> (7 - (i & 7))) & 1;
      }
    }
    this.draw();
    if (uses && !this.isStill.matches && !this.isAnimated) this.animate();
  }

  // Cells cool while they glow; with reduced motion only when the server says something.
  animate() {
    this.isAnimated = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.isAnimated = false;
      this.cool();
      this.draw();
      if (this.isLit && !this.isStill.matches) this.animate();
    }), FRAME_MS);
  }

  cool() {
    const now = performance.now();
    const factor = 0.5 ** ((now - this.cooledAt) / HALF_LIFE_MS);
    this.cooledAt = now;
    this.isLit = false;
    for (let i = 0; i < this.glow.length; i++) {
      this.glow[i] = this.glow[i] > DARK ? this.glow[i] * factor : 0;
      this.isLit ||= this.glow[i] > 0;
    }
  }

  // Layers go down the side; across the top where cells would be too narrow.
  layOut() {
    const width = this.canvas.parentElement.clientWidth;
    if (!this.modules.length || !width) {
      this.canvas.height = 0;
      return;
    }
    const layers = this.modules.length;
    this.isTurned = width / this.widest < NARROW_PX && layers < this.widest;
    this.columns = this.isTurned ? layers : this.widest;
    this.rows = this.isTurned ? this.widest : layers;
    const side = Math.max(CELL_PX.least, Math.min(CELL_PX.most, TALLEST_PX / this.rows));
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(side * this.rows * ratio);
    this.canvas.style.height = `${side * this.rows}px`;
    this.pixels.width = this.columns;
    this.pixels.height = this.rows;
    this.axes.textContent = this.isTurned
      ? `layers → ${layers}, experts ↓ ${this.widest}`
      : `experts → ${this.widest}, layers ↓ ${layers}`;
    this.draw();
  }

  draw() {
    if (!this.canvas.height || !this.modules.length) return;
    const { absent, resident, used } = this.colours;
    const image = this.pixels.getContext("2d").createImageData(this.columns, this.rows);
    this.modules.forEach((module, layer) => {
      for (let expert = 0; expert < module.experts; expert++) {
        const i = this.starts[layer] + expert;
        const cold = this.residents[i] ? resident : absent;
        const at = 4 * (this.isTurned ? expert * this.columns + layer : layer * this.columns + expert);
        for (let c = 0; c < 3; c++) image.data[at + c] = cold[c] + (used[c] - cold[c]) * this.glow[i];
        image.data[at + 3] = 255;
      }
    });
    this.pixels.getContext("2d").putImageData(image, 0, 0);
    const { context, canvas } = this;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.pixels, 0, 0, canvas.width, canvas.height);
    const [w, h] = [canvas.width / this.columns, canvas.height / this.rows];
    if (h >= MARKED_PX * (devicePixelRatio || 1)) this.markResidents(w, h);
    context.fillStyle = this.ground;
    if (w >= 4) for (let x = 1; x < this.columns; x++) context.fillRect(Math.round(x * w), 0, 1, canvas.height);
    if (h >= 4) for (let y = 1; y < this.rows; y++) context.fillRect(0, Math.round(y * h), canvas.width, 1);
    if (this.cursor) {
      const [x, y] = this.isTurned ? this.cursor : [this.cursor[1], this.cursor[0]];
      context.strokeStyle = this.ink;
      context.lineWidth = 2;
      context.strokeRect(x * w - 1, y * h - 1, w + 2, h + 2);
    }
  }

  // A glowing cell shows no more what is below: experts in memory keep a line at the foot.
  markResidents(w, h) {
    const thick = Math.max(2, Math.round(h / 6));
    this.context.fillStyle = `rgb(${this.colours.mark})`;
    this.modules.forEach((module, layer) => {
      for (let expert = 0; expert < module.experts; expert++) {
        if (!this.residents[this.starts[layer] + expert]) continue;
        const [x, y] = this.isTurned ? [layer, expert] : [expert, layer];
        this.context.fillRect(x * w, Math.round((y + 1) * h) - thick, w, thick);
      }
    });
  }

  tell([layer, expert]) {
    const module = this.modules[layer];
    if (!module || expert >= module.experts) return;
    const i = this.starts[layer] + expert;
    const place = this.residents[i] ? "in memory" : "on disk";
    this.cell.textContent = `${module.path}, expert ${expert}: ${place}, used ${this.total[i]} times`;
  }

  point(event) {
    if (!this.modules.length) return;
    const box = this.canvas.getBoundingClientRect();
    const x = Math.floor(((event.clientX - box.left) / box.width) * this.columns);
    const y = Math.floor(((event.clientY - box.top) / box.height) * this.rows);
    this.tell(this.isTurned ? [x, y] : [y, x]);
  }

  move(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const step = steps[event.key];
    if (!step || !this.modules.length) return;
    event.preventDefault();
    const [down, across] = this.isTurned ? [step[1], step[0]] : step;
    const [layer, expert] = this.cursor ?? [0, 0];
    const next = this.cursor ? [layer + down, expert + across] : [0, 0];
    const module = this.modules[next[0]];
    if (!module || next[1] < 0 || next[1] >= module.experts) return;
    this.cursor = next;
    this.tell(next);
    this.draw();
  }
}
