// The gate explorer. widgets/explorer.py puts this file behind inspector.js, whose helpers it uses.

/** The curve σ(βΔ) with a trajectory's tokens on it. */
class GateExplorer {
  constructor(model, root) {
    Object.assign(this, { model, root });
    const data = new Data(model);
    const [first] = data.meta.trajectories;
    const signals = data.signals(0, data.meta.skills.length ? 0 : -1);
    const ids = data.ids.subarray(first.start, first.end).filter((_, n) => data.mask[first.start + n]);
    this.points = [...signals.student].map((s, i) => ({ i, d: signals.teacher[i] - s, text: visible(data.bytes(ids[i])) }));
    this.points = this.points.filter((p) => signals.taught[p.i] && Number.isFinite(p.d));
    this.half = nice(Math.max(1, ...this.points.map((p) => Math.abs(p.d))));
    this.slider = h("input", { type: "range", min: 0, max: 20, step: 0.1, "aria-label": "β", oninput: (e) => this.set("beta", Number(e.target.value)) });
    this.exact = h("input", { type: "number", min: 0, step: "any", "aria-label": "β, exact", oninput: (e) => e.target.value !== "" && Number(e.target.value) >= 0 && this.set("beta", Number(e.target.value)) });
    this.plot = h("div", { class: "sk-chart" });
    this.told = h("output", { class: "sk-status", "aria-live": "polite" });
    root.classList.add("sk", "sk-gate");
    root.setAttribute("data-lm-suppress-shortcuts", "true");
    root.addEventListener("keydown", (e) => e.stopPropagation()); // JupyterLab would move the focus to its active cell
    root.append(h("div", { class: "sk-bar" }, h("label", {}, "β (1/nat)", this.slider, this.exact)), this.plot, this.told);
    this.redraw = () => this.draw();
    for (const name of ["beta", "token"]) model.on(`change:${name}`, this.redraw);
    this.draw();
    root.dataset.ready = "1";
  }

  destroy() {
    for (const name of ["beta", "token"]) this.model.off(`change:${name}`, this.redraw);
  }

  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
  }

  draw() {
    const beta = this.model.get("beta");
    this.slider.value = this.exact.value = beta;
    const [left, top, width, high] = [34, 8, 420, 170];
    const x = (d) => left + ((d + this.half) / (2 * this.half)) * width;
    const y = (gate) => top + (1 - gate) * high;
    const svg = g("svg", { viewBox: `0 0 ${left + width + 8} ${top + high + 34}`, tabindex: 0, role: "img", "aria-label": `gate σ(βΔ) at β = ${beta}, ${this.points.length} tokens` });
    for (const gate of [0, 0.5, 1]) svg.append(g("line", { x1: left, x2: left + width, y1: y(gate), y2: y(gate), class: "sk-grid" }), label(left - 4, y(gate) + 3, String(gate), "sk-end"));
    for (const d of [-this.half, 0, this.half]) svg.append(g("line", { x1: x(d), x2: x(d), y1: top, y2: top + high, class: "sk-grid" }), label(x(d), top + high + 13, plain(d, 1), "sk-middle"));
    const line = Array.from({ length: 201 }, (_, n) => -this.half + (n * this.half) / 100).map((d) => `${x(d).toFixed(2)},${y(sigmoid(beta * d)).toFixed(2)}`);
    svg.append(g("polyline", { points: line.join(" "), class: "sk-curve" }));
    const token = this.model.get("token");
    for (const p of this.points) {
      const gate = sigmoid(beta * p.d);
      const dot = g("circle", { cx: x(p.d), cy: y(gate), r: p.i === token ? 6 : 3.5, class: p.i === token ? "sk-dot cur" : "sk-dot", fill: `rgb(${p.d < 0 ? DOWN : UP})`, "data-token": p.i, "data-gate": gate });
      dot.append(g("title", {}, `${p.text}: Δ ${signed(p.d, 3)}, gate ${plain(gate, 3)}`));
      svg.append(dot);
    }
    svg.append(label(left + width / 2, top + high + 28, "Δ (nats)", "sk-middle"));
    svg.addEventListener("click", (e) => e.target.dataset.token !== undefined && this.set("token", Number(e.target.dataset.token)));
    svg.addEventListener("keydown", (e) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
      if (!step || !this.points.length) return;
      e.preventDefault();
      e.stopPropagation();
      const sorted = [...this.points].sort((a, b) => a.d - b.d);
      const at = sorted.findIndex((p) => p.i === token);
      this.set("token", sorted[at < 0 ? 0 : clamp(at + step, 0, sorted.length - 1)].i);
      this.plot.firstChild.focus();
    });
    this.plot.replaceChildren(svg);
    const now = this.points.find((p) => p.i === token);
    const mean = this.points.reduce((sum, p) => sum + sigmoid(beta * p.d), 0) / this.points.length;
    this.told.value = now
      ? `${now.text}: Δ ${signed(now.d)}, gate ${plain(sigmoid(beta * now.d))}`
      : this.points.length ? `mean gate ${plain(mean)} over ${this.points.length} tokens; click a point, or use the arrows` : "no skill reached the teacher: there is no Δ to gate";
  }
}

export default {
  render({ model, el }) {
    const root = h("div");
    el.append(root);
    const view = new GateExplorer(model, root);
    return () => view.destroy();
  },
};
