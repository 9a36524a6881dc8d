// The skill inspector: one module, no dependency. Python sends raw signals (widgets/signals.py); gap, gate, weight and
// loss are computed here and held equal to seedkit.methods by tests/browser. Text reaches the page by textContent only.

const BINS = 21, MIDDLE = 10, BLOCK = 200, MAX_NATS = 20, CLIP = 0.2;
const DOWN = "33 102 172", UP = "179 88 6"; // lowered, raised: safe for the common colour-vision deficiencies
const CLASSES = ["verb", "object", "receptacle", "number", "tag", "other"];
const SVG = "http://www.w3.org/2000/svg";
// Controls that would hide or reorder text are shown as escapes.
const HIDDEN =
  /[\u0000-\u0008\u000B-\u001F\u007F-\u009F\u00AD\u034F\u061C\u115F\u1160\u17B4\u17B5\u180E\u200B-\u200F\u2028-\u202E\u2060-\u206F\u3164\uFEFF\uFFA0\uFFF9-\uFFFB\u{E0000}-\u{E01EF}]/u;

const CHANNELS = {
  delta: ["shift Δ (nats)", "how much likelier the skill makes the token"],
  student: ["student log-prob (nats)", "ordinary context"],
  teacher: ["teacher log-prob (nats)", "same token, skill in the context"],
  gate: ["gate σ(βΔ)", "1 endorsed, ½ nothing said, 0 rejected"],
  advantage: ["advantage A (reward sd)", "one number for the whole episode"],
  weight: ["weight on ∇log π", "what the method does to the token: above 0 raises it"],
  pull: ["weight less A", "what the method adds to GRPO's weight"],
  loss: ["loss contribution", "the token's own term of the loss that is minimised"],
  kl: ["full KL (nats)", "KL(student ‖ teacher) over the whole vocabulary"],
  checkpoint: ["log-prob at checkpoint less at rollout (nats)", "how training moved this very token"],
  diff: ["Δ of this skill less Δ of the other (nats)", "where two skills disagree"],
};

// --- numbers

const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const nought = (x) => (Number.isNaN(x) ? 0 : x);

/** Δ of every token; NaN where no skill reached it. */
function shift({ student, teacher, taught }) {
  const delta = new Float64Array(student.length);
  for (let i = 0; i < delta.length; i++) delta[i] = taught[i] === 1 && Number.isFinite(teacher[i]) ? teacher[i] - student[i] : NaN;
  return delta;
}

/** Per-token numbers of a method, float64: {delta, gate, pull, weight, loss}. NaN where no skill reached the token. */
function numbers(method, beta, coef, signals) {
  const { advantage, student, teacher, behaviour } = signals;
  const n = student.length;
  const delta = shift(signals);
  const [gate, pull, weight, loss] = Array.from({ length: 4 }, () => new Float64Array(n));
  for (let i = 0; i < n; i++) {
    const s = student[i], k = teacher[i], o = behaviour[i];
    const gap = nought(delta[i]), reached = !Number.isNaN(delta[i]);
    const g = sigmoid(beta * gap);
    const ratio = Math.exp(s - o);
    let a = advantage[i];
    if (reached && method.shaping === "rlsd")
      a *= 1 - coef + coef * clamp(Math.exp(Math.sign(a) * gap), 1 - CLIP, 1 + CLIP);
    if (reached && method.shaping === "opid") a += coef * gap;
    let w = 0, l = 0, own = 0;
    if (method.policy_gradient) {
      w = surrogate(a, ratio);
      own = surrogate(advantage[i], ratio);
      l = -Math.min(ratio * a, clamp(ratio, 1 - CLIP, 1 + CLIP) * a);
    }
    if (reached && method.term) {
      const [value, force] = TERMS[method.term](gap, g, ratio, k - o);
      w += coef * force;
      l += coef * value;
    }
    gate[i] = reached ? g : NaN;
    weight[i] = w;
    pull[i] = reached ? w - own : 0;
    loss[i] = l;
  }
  return { delta, gate, pull, weight, loss };
}

/** GRPO's weight: ρ·A, or 0 where the clip has stopped the gradient. */
const surrogate = (a, ratio) => ((a > 0 ? ratio > 1 + CLIP : ratio < 1 - CLIP) ? 0 : ratio * a);

// (Δ, gate, ρ, k - o) → [loss, weight]; seedkit.gate has the formulas and their sources.
const TERMS = {
  gated: (d, g) => [g * d, g],
  plain: (d) => [d, 1],
  centred: (d, g) => [(g - 0.5) * d, g - 0.5],
  skill_sd: (d, g, ratio, ko) => [Math.exp(Math.min(ko, MAX_NATS)) - ratio * (1 + d), ratio * d],
  reverse_kl_sampled: (d) => [(d * d) / 2, d],
};

// --- text

const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

function decode(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

/** True when more bytes could still make these valid UTF-8: a start byte, and fewer that follow than it asks for. */
function unfinished(bytes) {
  for (let n = 1; n <= Math.min(3, bytes.length); n++) {
    const byte = bytes[bytes.length - n];
    if (byte >= 0xc2) return n < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) && decode(bytes.subarray(0, -n)) !== null;
    if (byte < 0x80) return false;
  }
  return false;
}

/** Bytes as [text, escape]; escape is null for what can be shown as it is. */
function pieces(bytes) {
  const out = [];
  let at = 0;
  while (at < bytes.length) {
    let size = 0;
    for (let n = Math.min(4, bytes.length - at); n >= 1 && !size; n--)
      if (decode(bytes.subarray(at, at + n)) !== null) size = n;
    if (size) {
      const run = decode(bytes.subarray(at, at + size));
      for (const c of run) out.push([c, HIDDEN.test(c) ? escapeOf(c) : null]);
      at += size;
    } else {
      out.push(["\uFFFD", "\\x" + bytes[at].toString(16).toUpperCase().padStart(2, "0")]);
      at += 1;
    }
  }
  const joined = [];
  for (const [text, escape] of out) {
    if (escape === null && joined.length && joined.at(-1)[1] === null) joined.at(-1)[0] += text;
    else joined.push([text, escape]);
  }
  return joined;
}

function escapeOf(character) {
  const hex = character.codePointAt(0).toString(16).toUpperCase();
  return hex.length > 4 ? `\\u{${hex}}` : `\\u${hex.padStart(4, "0")}`;
}

const marks = (space) => [...space].map((c) => ({ "\n": "↵", "\t": "→", " ": "·" })[c]).join("");

/** Bytes as one visible line, for cards and tables. */
function visible(bytes) {
  const text = pieces(bytes).map(([t, e]) => e ?? t).join("");
  return text ? text.replace(/^ +| +$|[\n\t]/g, marks) : "∅";
}

const signed = (x, digits = 6) => (Number.isFinite(x) ? (x < 0 ? "−" : "+") + Math.abs(x).toFixed(digits) : "–");
const plain = (x, digits = 6) => (Number.isFinite(x) ? x.toFixed(digits).replace("-", "−") : "–");

// --- elements

function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c != null));
  return node;
}

function g(tag, props = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const colour = (bin) => `rgb(${bin < MIDDLE ? DOWN : UP} / ${((Math.abs(bin - MIDDLE) / MIDDLE) * 0.62).toFixed(3)})`;

/** Smallest of 1, 2, 5 × 10ⁿ that is not below x. */
function nice(x) {
  if (!(x > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((m) => m * unit).find((m) => m >= x * (1 - 1e-9));
}

/** Of the sizes of all finite values in some arrays; 0 where there are none. */
function quantile(arrays, q) {
  const sizes = new Float64Array(arrays.reduce((n, values) => n + values.length, 0));
  let n = 0;
  for (const values of arrays) for (const x of values) if (Number.isFinite(x)) sizes[n++] = Math.abs(x);
  return sizes.subarray(0, n).sort()[Math.min(n - 1, Math.floor(q * n))] ?? 0;
}

// --- data

const [F4, I4, U1] = [Float32Array, Int32Array, Uint8Array];
const TYPES = { ids: I4, mask: U1, turn: Int16Array, kind: U1, behaviour: F4, advantage: F4, student: F4, teacher: F4,
  taught: U1, checkpoint_logp: F4, kl: F4, alt_ids: I4, alt_logp: F4, alt_rank: I4, custom: Float64Array,
  vocabulary: U1, vocabulary_ids: I4, vocabulary_ends: I4 };

class Data {
  constructor(model) {
    for (const [name, Type] of Object.entries(TYPES)) {
      const view = model.get(name);
      const bytes = view?.byteLength ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : 0;
      this[name] = new Type(bytes);
    }
    this.meta = model.get("meta");
    this.places = new Map();
    this.vocabulary_ids.forEach((id, n) => this.places.set(id, n));
    this.shown = new Map();
    this.responses = this.meta.responses; // response tokens of all trajectories together
  }

  bytes(id) {
    const n = this.places.get(id);
    return n === undefined ? new Uint8Array(0) : this.vocabulary.subarray(n ? this.vocabulary_ends[n - 1] : 0, this.vocabulary_ends[n]);
  }

  /** Text of a token, or null when its bytes are part of a character. */
  text(id) {
    if (!this.shown.has(id)) this.shown.set(id, decode(this.bytes(id)));
    return this.shown.get(id);
  }

  /** The response tokens of a trajectory under a skill. */
  signals(number, skill) {
    const t = this.meta.trajectories[number];
    const [from, to] = [t.response_start, t.response_end];
    const of = (array, row) => array.subarray(row * this.responses + from, row * this.responses + to);
    const none = new Float32Array(to - from);
    const known = skill >= 0;
    return {
      advantage: of(this.advantage, 0),
      behaviour: of(this.behaviour, 0),
      student: known && this.student.length ? of(this.student, skill) : of(this.behaviour, 0),
      teacher: known ? of(this.teacher, skill) : none,
      taught: known ? of(this.taught, skill) : new Uint8Array(to - from),
      kl: known && this.kl.length ? of(this.kl, skill) : null,
    };
  }
}

// --- inspector

const CONTROLS = ["trajectory", "skill", "other", "checkpoint", "method", "beta", "coef", "channel", "underline", "view"];
let serial = 0;
const finds = new Map(); // instance → ranges of its search, all in one highlight

class Inspector {
  constructor(model, root) {
    this.model = model;
    this.root = root;
    this.name = `sk${++serial}`;
    this.blocks = [];
    this.seen = new Set();
    this.observer = new IntersectionObserver((entries) => this.onVisible(entries), { rootMargin: "300px" });
    this.build();
    this.load();
    this.handlers = [];
    const on = (event, handler) => {
      model.on(event, handler);
      this.handlers.push([event, handler]);
    };
    for (const name of CONTROLS) on(`change:${name}`, () => this.onControl(name));
    on("change:token", () => this.showToken());
    on("change:selection", () => this.showSelection());
    on("change:revision", () => this.load());
    this.root.dataset.ready = "1";
  }

  destroy() {
    clearTimeout(this.later);
    this.observer.disconnect();
    for (const [event, handler] of this.handlers) this.model.off(event, handler);
    finds.delete(this);
    showFinds();
  }

  get(name) {
    return this.model.get(name);
  }

  set(name, value) {
    this.model.set(name, value);
    this.model.save_changes();
  }

  // --- skeleton ---

  build() {
    const c = (this.controls = {});
    const pick = (name, label, help, read = String) => {
      c[name] = h("select", { "aria-label": label, onchange: (e) => this.set(name, read(e.target.value)) });
      return h("label", { title: help }, label, c[name]);
    };
    const number = (name, label, max, step, help) => {
      const change = (e) => e.target.value !== "" && Number(e.target.value) >= 0 && this.set(name, Number(e.target.value));
      c[name] = h("input", { type: "range", min: 0, max, step, "aria-label": label, oninput: change });
      c[name + "_exact"] = h("input", { type: "number", min: 0, step: "any", "aria-label": `${label}, exact`, oninput: change });
      return h("label", { title: help }, label, c[name], c[name + "_exact"]);
    };
    const button = (name, label, help, act) => {
      c[name] = h("button", { type: "button", title: help, "aria-label": help, onclick: act }, label);
      return c[name];
    };
    c.checkpoint = h("input", { type: "range", min: 0, step: 1, "aria-label": "checkpoint", oninput: (e) => this.set("checkpoint", Number(e.target.value)) });
    c.checkpoint_name = h("output");
    this.checkpointRow = h("label", { title: "the policy at which these very tokens are scored" }, "checkpoint", c.checkpoint, c.checkpoint_name);
    c.search = h("input", { type: "search", placeholder: "search the text", "aria-label": "search the text" });
    c.search.addEventListener("input", () => this.search());
    c.search.addEventListener("keydown", (e) => e.key === "Enter" && this.nextFind(e.shiftKey ? -1 : 1));
    c.found = h("output", { class: "sk-found" });
    this.status = h("div", { class: "sk-status", role: "status" });
    this.skillText = h("div", { class: "sk-skill", dir: "auto" });
    this.text = h("div", { class: "sk-text", tabindex: 0, role: "group", "aria-label": "trajectory; arrows move by token, [ ] by turn, n p by shift" });
    this.table = h("div", { class: "sk-table", tabindex: 0, role: "group", "aria-label": "table of tokens" });
    this.card = h("div", { class: "sk-card", "aria-live": "polite" });
    this.legend = h("div", { class: "sk-legend" });
    this.heat = h("div", { class: "sk-chart" });
    this.histogram = h("div", { class: "sk-chart" });
    this.chosen = h("output", { class: "sk-chosen" });
    this.books = h("div", { class: "sk-books" });
    this.provenance = h("div", { class: "sk-provenance" });
    this.root.style.setProperty("--sk-height", `${this.get("height")}px`);
    for (let b = 0; b < BINS; b++) this.root.style.setProperty(`--b${b}`, colour(b));
    this.root.append(
      h("div", { class: "sk-bar" },
        pick("trajectory", "trajectory", "a finished episode", Number),
        pick("skill", "skill", "the skill in the teacher's context"),
        pick("other", "less", "a second skill: the channel “diff” shows the first's Δ less this one's"),
        this.checkpointRow),
      h("div", { class: "sk-bar" },
        pick("method", "method", "what turns shifts into weights"),
        number("beta", "β", 20, 0.1, "gate steepness, 1/nat"),
        number("coef", "λ", 1, 0.005, "weight of the added term (μ of RLSD, w of OPID)"),
        this.formula = h("span", { class: "sk-formula" })),
      h("div", { class: "sk-bar" },
        pick("channel", "colour", "what colours the tokens"),
        pick("underline", "underline", "a second channel: solid above, dotted below; thicker is larger"),
        button("previous", "◂ |Δ|", "previous by size of Δ (p)", () => this.jump(-1)),
        button("next", "|Δ| ▸", "next by size of Δ (n)", () => this.jump(1)),
        button("fold", "fold", "fold or unfold all turns", () => this.foldAll()),
        button("view", "table", "text or table (t)", () => this.set("view", this.get("view") === "table" ? "text" : "table")),
        h("span", { class: "sk-search" }, c.search, c.found)),
      this.status,
      this.legend,
      h("div", { class: "sk-main" },
        h("div", { class: "sk-left" }, this.text, this.table),
        h("div", { class: "sk-side" }, this.skillText, this.card)),
      h("div", { class: "sk-charts" }, this.heat, this.histogram),
      h("div", { class: "sk-bar" }, this.chosen, button("clear", "clear", "clear the selection (Escape)", () => this.set("selection", []))),
      this.books,
      this.provenance,
    );
    this.root.addEventListener("keydown", (e) => this.onKey(e));
    this.text.addEventListener("click", (e) => this.onClick(e));
    this.root.addEventListener("copy", (e) => this.onCopy(e));
  }

  /** Read the buffers (again) and draw everything. */
  load() {
    this.data = new Data(this.model);
    const { meta } = this.data;
    const fill = (select, items) => select.replaceChildren(...items.map(([value, text, title]) => h("option", { value, title }, text)));
    fill(this.controls.trajectory, meta.trajectories.map((t, n) => [n, t.label]));
    fill(this.controls.skill, meta.skills.length ? meta.skills.map((s) => [s, s]) : [["", "none"]]);
    fill(this.controls.other, [["", "nothing"], ...meta.skills.map((s) => [s, s])]);
    fill(this.controls.method, meta.methods.map((m) => [m.name, m.name, m.title]));
    const hidden = { kl: !this.data.kl.length, checkpoint: !meta.checkpoints.length, diff: meta.skills.length < 2 };
    const channels = Object.entries(CHANNELS).filter(([name]) => !hidden[name]).map(([name, words]) => [name, ...words]);
    fill(this.controls.channel, channels);
    fill(this.controls.underline, [["", "nothing"], ...channels]);
    this.controls.other.parentNode.hidden = hidden.diff;
    this.checkpointRow.hidden = hidden.checkpoint;
    this.controls.checkpoint.max = Math.max(0, meta.checkpoints.length - 1);
    this.domains = new Map();
    this.provenance.textContent = meta.provenance.join(" · ");
    this.number = -1;
    this.refresh();
  }

  get trajectory() {
    return this.data.meta.trajectories[this.number];
  }

  get method() {
    return this.data.meta.methods.find((m) => m.name === this.get("method"));
  }

  /** Index of the chosen skill, -1 for none. */
  get skill() {
    return this.data.meta.skills.indexOf(this.get("skill"));
  }

  onControl(name) {
    if (name === "method") {
      const { beta, coef } = this.method;
      this.model.set("beta", beta);
      this.model.set("coef", coef);
      this.model.save_changes();
    }
    if (name === "trajectory") {
      this.model.set("token", -1);
      this.set("selection", []);
    }
    this.refresh();
  }

  /** Recompute the trajectory's numbers and redraw what depends on them. */
  refresh() {
    const { meta } = this.data;
    for (const name of [...CONTROLS, "beta_exact", "coef_exact"]) {
      const control = this.controls[name];
      const value = this.get(name.replace("_exact", ""));
      const typing = control.type === "number" && control === document.activeElement; // an echo must not wipe it
      if (control.tagName !== "BUTTON" && !typing && control.value !== String(value)) control.value = value;
    }
    const table = this.get("view") === "table";
    this.controls.view.textContent = table ? "text" : "table";
    const focused = [this.text, this.table].includes(document.activeElement);
    this.text.hidden = table;
    this.table.hidden = !table;
    if (focused) (table ? this.table : this.text).focus({ preventScroll: true });
    const number = clamp(this.get("trajectory"), 0, meta.trajectories.length - 1);
    const fresh = number !== this.number;
    this.number = number;
    if (!this.trajectory) {
      this.status.textContent = "No trajectory to show.";
      return;
    }
    if (fresh) this.layOut();
    this.compute();
    this.order = null;
    this.showState();
    this.showLegend();
    this.showBooks();
    this.drawHeat();
    this.drawHistogram();
    this.showSelection();
    this.showToken(false);
    if (table) this.drawTable();
  }

  compute() {
    const { skill, method, data } = this;
    const signals = (this.signals = data.signals(this.number, skill));
    const n = signals.student.length;
    const values = numbers(method, this.get("beta"), this.get("coef"), signals);
    if (!method.closed_form && data.custom.length) {
      const t = this.trajectory;
      const of = (row) => data.custom.subarray(row * data.responses + t.response_start, row * data.responses + t.response_end);
      [values.weight, values.loss, values.pull] = [of(0), of(1), of(2)];
    }
    values.student = signals.student;
    values.teacher = Float32Array.from(signals.teacher, (k, i) => (signals.taught[i] ? k : NaN));
    values.advantage = signals.advantage;
    const unknown = new Float64Array(n).fill(NaN);
    values.kl = signals.kl ?? unknown;
    const other = data.meta.skills.indexOf(this.get("other"));
    values.diff = values.checkpoint = unknown;
    if (other >= 0) {
      const theirs = shift(data.signals(this.number, other));
      values.diff = values.delta.map((d, i) => d - theirs[i]);
    }
    if (data.meta.checkpoints.length) {
      const from = this.get("checkpoint") * data.responses + this.trajectory.response_start;
      values.checkpoint = Float64Array.from(signals.student, (s, i) => data.checkpoint_logp[from + i] - s);
    }
    this.values = values;
  }

  /** [centre, half width] of a channel's scale: the same for all skills, checkpoints, trajectories and β. */
  domain(name) {
    const key = ["weight", "pull", "loss"].includes(name) ? `${name} ${this.get("method")} ${this.get("coef")}` : name;
    if (this.domains.has(key)) return this.domains.get(key);
    const { data } = this;
    const all = [];
    for (let s = 0; s < Math.max(1, data.meta.skills.length); s++) {
      for (let t = 0; t < data.meta.trajectories.length; t++) {
        const signals = data.signals(t, data.meta.skills.length ? s : -1);
        if (["advantage", "kl"].includes(name)) all.push(signals[name] ?? []);
        else if (["student", "teacher"].includes(name)) all.push(signals.student);
        else if (["delta", "diff"].includes(name)) all.push(shift(signals));
        else if (name !== "checkpoint") all.push(numbers(this.method, this.method.beta, this.get("coef"), signals)[name]);
      }
    }
    if (name === "checkpoint") all.push(data.checkpoint_logp.map((p, i) => p - data.behaviour[i % data.responses]));
    if (!this.method.closed_form) all.push(this.values?.[name] ?? []);
    const range = name === "gate" ? [0.5, 0.5] : [0, nice(quantile(all, 0.99))];
    this.domains.set(key, range);
    return range;
  }

  // --- text ---

  /** Begin a trajectory's text: what fills the window is drawn at once. */
  layOut() {
    const { data, trajectory: t } = this;
    this.observer.disconnect();
    this.blocks = [];
    this.seen.clear();
    this.elements = new Array(t.response_end - t.response_start);
    this.current = null;
    finds.delete(this);
    showFinds();
    this.controls.search.value = this.controls.found.value = "";
    const sampled = (array) => array.subarray(t.start, t.end).filter((_, n) => data.mask[t.start + n]);
    [this.ids, this.turnsOf] = [sampled(data.ids), sampled(data.turn)];
    this.text.replaceChildren();
    this.text.setAttribute("aria-busy", "true");
    this.drawing = this.turns();
    const enough = 5 * this.get("height"); // lines are 24 pixels high: 120 tokens a line
    this.draw((drawn) => drawn >= enough);
  }

  /** Draw blocks in order until there are enough, else all; the others follow by themselves, between the browser's frames. */
  draw(enough = () => false) {
    clearTimeout(this.later);
    while (!enough(this.drawn))
      if (this.drawing.next().done) return this.text.setAttribute("aria-busy", "false");
    this.later = setTimeout(() => {
      const until = performance.now() + 30;
      this.draw(() => performance.now() > until);
    }, 16);
  }

  /** Turns as blocks of at most 200 tokens, one a step; a block is laid out by the browser when it comes near the window. */
  *turns() {
    const { start, turns } = this.trajectory;
    let response = 0;
    for (const [n, turn] of turns.entries()) {
      const body = h("div", { class: "sk-body", dir: "auto" });
      const count = turn.end - turn.start;
      const words = [`turn ${n + 1}`, `${count} tokens`];
      if (turn.valid === false) words.push(`invalid: ${turn.reason}`);
      if (turn.reward) words.push(`reward ${turn.reward}`);
      const head = h("button", { type: "button", class: "sk-turn", "aria-expanded": "true", tabindex: -1 }, words.join(" · "));
      this.text.append(h("section", { "data-turn": n, "data-invalid": turn.valid === false }, head, body));
      for (let from = turn.start; from < turn.end; ) {
        const to = Math.min(from + BLOCK, turn.end);
        const block = this.block(from, to, response, from === turn.start);
        response += block.count;
        from = block.to;
        body.append(block.node);
        if (block.count) {
          this.blocks.push(block);
          this.observer.observe(block.node);
        }
        this.drawn = from - start;
        yield;
      }
    }
  }

  /** One block of spans. Tokens that share a character share a span; a group is never split over blocks. */
  block(from, to, response, first) {
    const { data } = this;
    const { joiner } = data.meta;
    const node = h("div", { class: "sk-block" });
    const start = response;
    let i = from;
    while (i < to) {
      if (joiner && !(first && i === from)) node.append(joiner);
      const span = document.createElement("span");
      node.append(span);
      if (!data.mask[i]) {
        span.className = "o";
        i = this.context(span, i, to);
        continue;
      }
      const text = data.text(data.ids[i]);
      if (text !== null) this.fill(span, text);
      const until = text !== null ? i + 1 : this.group(span, i, this.trajectory.end);
      if (until - i > 1) span.dataset.group = until - i;
      for (; i < until; i++) this.elements[response++] = span;
    }
    node.style.containIntrinsicBlockSize = `auto ${Math.ceil((i - from) / 14) * 24}px`;
    return { node, to: i, count: response - start, start, dirty: true };
  }

  /** The game's words from token i on, in one span: they are context, nothing is trained on them. */
  context(span, i, to) {
    const { data } = this;
    const parts = [];
    const start = i;
    for (; i < to && !data.mask[i]; i++) {
      if (data.meta.joiner && i > start) parts.push(utf8(data.meta.joiner));
      parts.push(data.bytes(data.ids[i]));
    }
    for (; i < this.trajectory.end && !data.mask[i] && data.turn[i] === data.turn[start] && !decode(join(parts)) && unfinished(join(parts)); i++)
      parts.push(data.bytes(data.ids[i]));
    this.fillPieces(span, join(parts));
    return i;
  }

  /** Several tokens whose bytes make characters only together; returns the index after the last. */
  group(span, i, last) {
    const { data } = this;
    let bytes = data.bytes(data.ids[i]);
    for (let n = i + 1; n < last && n < i + 8 && data.mask[n] && data.turn[n] === data.turn[i] && unfinished(bytes); n++) {
      bytes = join([bytes, data.bytes(data.ids[n])]);
      const text = decode(bytes);
      if (text !== null) {
        this.fill(span, text);
        return n + 1;
      }
    }
    this.fillPieces(span, data.bytes(data.ids[i]));
    return i + 1;
  }

  fill(span, text) {
    if (text === "") span.dataset.w = "∅";
    else if (/^[ \n\t]+$/.test(text)) span.dataset.w = marks(text);
    if (HIDDEN.test(text)) this.fillPieces(span, utf8(text));
    else span.textContent = text;
  }

  /** Text that has to be escaped in part; its bytes stay with it for copies. */
  fillPieces(span, bytes) {
    span.raw = bytes;
    for (const [text, escape] of pieces(bytes)) {
      if (escape === null) span.append(text);
      else span.append(h("span", { class: "e", "data-e": escape }, text));
    }
  }

  onVisible(entries) {
    for (const entry of entries) {
      const block = this.blocks.find((b) => b.node === entry.target);
      if (!block) continue;
      if (entry.isIntersecting) {
        this.seen.add(block);
        if (block.dirty) this.paintBlock(block);
      } else this.seen.delete(block);
    }
  }

  /** Colour the blocks in sight; the others when they come. */
  paint() {
    const scale = (name) => {
      if (!name || !this.values[name]) return null;
      const [centre, half] = this.domain(name);
      const values = this.values[name];
      return (i) => (values[i] - centre) / half;
    };
    this.colouring = scale(this.get("channel"));
    this.underlining = scale(this.get("underline"));
    for (const [n, block] of this.blocks.entries()) {
      block.dirty = true;
      if (this.seen.has(block) || n < 4) this.paintBlock(block);
    }
  }

  bin(i) {
    const x = this.colouring(i);
    return Number.isFinite(x) ? clamp(Math.round(x * MIDDLE), -MIDDLE, MIDDLE) + MIDDLE : -1;
  }

  paintBlock(block) {
    block.dirty = false;
    const chosen = this.selected;
    for (let i = block.start; i < block.start + block.count; i++) {
      const span = this.elements[i];
      const size = Number(span.dataset.group ?? 1);
      const classes = [];
      if (size > 1) {
        const stops = [];
        for (let j = 0; j < size; j++) {
          const bin = this.colouring ? this.bin(i + j) : MIDDLE;
          stops.push(`${bin < 0 ? "transparent" : `var(--b${bin})`} ${(100 * j) / size}% ${(100 * (j + 1)) / size}%`);
        }
        span.style.backgroundImage = `linear-gradient(90deg, ${stops.join(",")})`;
        classes.push("g");
      } else if (this.colouring) {
        const bin = this.bin(i);
        classes.push(bin < 0 ? "na" : `b${bin}`);
        if (Math.abs(this.colouring(i)) > 1.0001) classes.push("clip");
      }
      if (this.underlining) {
        const x = this.underlining(i);
        const level = Math.min(4, Math.round(Math.abs(x) * 4));
        if (level) classes.push((x > 0 ? "u" : "d") + level);
      }
      if (chosen?.has(i)) classes.push("sel");
      if (span === this.current) classes.push("cur");
      span.className = classes.join(" ");
      i += size - 1;
    }
  }

  // --- current token, selection ---

  get count() {
    return this.elements.length;
  }

  go(token, focus = true) {
    if (!this.count) return;
    this.set("token", clamp(token, 0, this.count - 1));
    if (focus && this.get("view") !== "table") this.text.focus({ preventScroll: true });
  }

  showToken(scroll = true) {
    if (!this.trajectory) return;
    this.current?.classList.remove("cur");
    this.current?.removeAttribute("id");
    this.current?.removeAttribute("aria-label");
    const i = this.get("token");
    if (i in this.turnsOf) this.draw(() => this.elements[i]);
    this.current = this.elements[i] ?? null;
    if (this.current) {
      this.fold(this.current.closest("section"), false);
      this.current.classList.add("cur");
      this.current.id = `${this.name}-token`;
      this.current.setAttribute("aria-label", this.label(i));
      this.text.setAttribute("aria-activedescendant", this.current.id);
      if (scroll && !this.text.hidden) this.reveal(this.current);
    }
    this.drawCard();
  }

  /** Scroll the text, and only the text, until a node in it is seen. */
  reveal(node) {
    for (let again = 0; again < 2; again++) {
      const [box, frame] = [node.getBoundingClientRect(), this.text.getBoundingClientRect()];
      if (box.top < frame.top + 24) this.text.scrollTop += box.top - frame.top - 60;
      else if (box.bottom > frame.bottom - 8) this.text.scrollTop += box.bottom - frame.bottom + 60;
    }
  }

  label(i) {
    const { values: v } = this;
    return `${visible(this.data.bytes(this.ids[i]))}: turn ${this.turnsOf[i] + 1}, Δ ${signed(v.delta[i], 3)}, gate ${plain(v.gate[i], 3)}, weight ${signed(v.weight[i], 3)}`;
  }

  /** Class of the i-th response token. */
  kind(i) {
    return CLASSES[this.data.kind[this.trajectory.response_start + i]];
  }

  showSelection() {
    this.selected = new Set(this.get("selection"));
    this.paint();
    const n = this.selected.size;
    this.chosen.value = n ? `${n} token${n > 1 ? "s" : ""} selected` : "click a cell or drag over bars to select tokens";
    this.controls.clear.hidden = !n;
    if (n && this.get("view") === "table") this.drawTable();
  }

  select(tokens) {
    this.set("selection", tokens);
    if (tokens.length) this.go(tokens[0], false);
  }

  /** To the token before or after the current one in the order of |Δ|, largest first. */
  jump(step) {
    if (!this.count) return;
    const size = (i) => (Number.isFinite(this.values.delta[i]) ? Math.abs(this.values.delta[i]) : -1);
    this.order ??= Array.from({ length: this.count }, (_, i) => i).sort((a, b) => size(b) - size(a) || a - b);
    const at = this.order.indexOf(this.get("token"));
    this.go(this.order[at < 0 ? 0 : clamp(at + step, 0, this.count - 1)]);
  }

  fold(section, folded = !section.classList.contains("folded")) {
    section.classList.toggle("folded", folded);
    section.firstChild.setAttribute("aria-expanded", String(!folded));
  }

  foldAll() {
    this.draw();
    const sections = [...this.text.children];
    const folded = !sections.every((s) => s.classList.contains("folded"));
    for (const section of sections) this.fold(section, folded);
    this.controls.fold.textContent = folded ? "unfold" : "fold";
  }

  onClick(event) {
    const head = event.target.closest(".sk-turn");
    if (head) return this.fold(head.parentNode);
    let span = event.target.closest("span");
    if (span?.classList.contains("e")) span = span.parentNode;
    if (!span || span.classList.contains("o") || !getSelection().isCollapsed) return;
    let i = this.elements.indexOf(span);
    if (i < 0) return;
    if (span.dataset.group) {
      const box = span.getBoundingClientRect();
      i += clamp(Math.floor(((event.clientX - box.left) / box.width) * span.dataset.group), 0, span.dataset.group - 1);
    }
    this.go(i);
  }

  onKey(event) {
    event.stopPropagation(); // JupyterLab would move the focus to its active cell
    if (event.target.matches("input, select, textarea") && event.key !== "Escape") return;
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest(".sk-chart")) return;
    const i = this.get("token");
    const turn = this.turnsOf?.[i] ?? 0;
    const open = (n) => this.turnsOf.includes(n) && this.go(this.turnsOf.indexOf(n));
    if (event.target.matches("button") && [" ", "Enter"].includes(event.key)) return;
    const act = {
      ArrowRight: () => this.go(i + 1),
      ArrowLeft: () => this.go(Math.max(0, i - 1)),
      Home: () => this.go(0),
      End: () => this.go(this.count - 1),
      "]": () => open(turn + 1),
      "[": () => open(turn - 1),
      n: () => this.jump(1),
      p: () => this.jump(-1),
      c: () => this.current && this.fold(this.current.closest("section")),
      t: () => this.controls.view.click(),
      "/": () => this.controls.search.focus(),
      Escape: () => {
        this.set("selection", []);
        this.text.focus({ preventScroll: true });
      },
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** What is copied is the text as it was, without headings and marks. */
  onCopy(event) {
    const selection = getSelection();
    if (selection.isCollapsed || !this.text.contains(selection.anchorNode)) return;
    this.draw();
    const range = selection.getRangeAt(0);
    const parts = [];
    let turn = null, whole = null;
    for (const node of textNodes(this.text)) {
      if (!range.intersectsNode(node)) continue;
      const section = node.parentNode.closest("section");
      if (turn && section !== turn) parts.push(utf8(this.data.meta.joiner));
      turn = section;
      const owner = node.parentNode.closest("span:not(.e)");
      if (owner?.raw && holds(range, owner)) {
        if (owner !== whole) parts.push(owner.raw);
        whole = owner;
        continue;
      }
      const from = node === range.startContainer ? range.startOffset : 0;
      const to = node === range.endContainer ? range.endOffset : node.data.length;
      parts.push(utf8(node.data.slice(from, to)));
    }
    const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(join(parts));
    event.clipboardData.setData("text/plain", text);
    event.preventDefault();
  }

  // --- search ---

  search() {
    const wanted = this.controls.search.value.toLowerCase();
    this.found = [];
    this.foundAt = -1;
    if (wanted) {
      this.draw();
      const nodes = [...textNodes(this.text)];
      const starts = [];
      let all = "";
      for (const node of nodes) {
        starts.push(all.length);
        all += node.data.toLowerCase().length === node.data.length ? node.data.toLowerCase() : node.data;
      }
      const locate = (at) => {
        let [low, high] = [0, nodes.length - 1];
        while (low < high) {
          const middle = (low + high + 1) >> 1;
          if (starts[middle] <= at) low = middle;
          else high = middle - 1;
        }
        return [nodes[low], at - starts[low]];
      };
      for (let at = all.indexOf(wanted); at >= 0 && this.found.length < 5000; at = all.indexOf(wanted, at + wanted.length)) {
        const range = document.createRange();
        range.setStart(...locate(at));
        const [node, offset] = locate(at + wanted.length - 1);
        range.setEnd(node, offset + 1);
        this.found.push(range);
      }
    }
    finds.set(this, this.found);
    showFinds();
    if (this.found.length) this.nextFind(1);
    else this.controls.found.value = wanted ? "not found" : "";
  }

  nextFind(step) {
    const count = this.found?.length;
    if (!count) return;
    this.foundAt = (this.foundAt + step + count) % count;
    const node = this.found[this.foundAt].startContainer.parentElement;
    this.fold(node.closest("section"), false);
    this.controls.found.value = `${this.foundAt + 1} of ${count}`;
    const i = this.elements.indexOf(node);
    if (i >= 0) this.go(i, false);
    this.reveal(node);
  }

  // --- panels ---

  showState() {
    const t = this.trajectory;
    const lines = t.skills.length ? [...t.skills[this.skill].notes] : ["No shifts were given: only what GRPO does can be shown."];
    if (t.truncated) lines.push("Truncated: the episode was cut off by its limit of turns or tokens, it did not end by itself.");
    if (!this.count) lines.push("Empty: no token was sampled in this trajectory.");
    if (!this.method.closed_form && !this.data.custom.length) lines.push(`${this.method.name} is computed in Python, and no numbers were sent.`);
    if (this.method.skill_in_prompt) lines.push(`${this.method.name} trains with the skill in its own context; these tokens were sampled without it.`);
    this.status.replaceChildren(...lines.map((line) => h("p", {}, line)));
    this.status.hidden = !lines.length;
    this.root.dataset.state = t.skills[this.skill]?.state ?? "no shifts";
    const skill = t.skills[this.skill];
    this.skillText.replaceChildren(
      h("b", {}, skill ? `skill (${skill.tokens} tokens reached the teacher)` : "no skill"),
      h("p", {}, skill?.text || "–"),
      ...(skill?.steps ?? []).map(([turn, text]) => h("p", {}, `before turn ${turn + 1}: ${text}`)),
      h("small", {}, skill?.author ?? ""),
    );
    this.formula.textContent = `weight: ${this.method.formula}`;
    this.controls.checkpoint_name.value = this.data.meta.checkpoints[this.get("checkpoint")] ?? "";
  }

  showLegend() {
    const name = this.get("channel");
    const [centre, half] = this.domain(name);
    const swatch = (cls, text) => h("span", { class: "sk-swatch" }, h("span", { class: cls }, "\u00A0\u00A0\u00A0"), text);
    const ramp = h("span", { class: "sk-ramp", "aria-hidden": "true" });
    for (let b = 0; b < BINS; b++) ramp.append(h("span", { class: `b${b}` }));
    const [label, help] = CHANNELS[name];
    const under = this.get("underline");
    this.legend.replaceChildren(
      h("span", { title: help }, `${label}: `),
      h("span", {}, plain(centre - half, 2), ramp, plain(centre + half, 2)),
      swatch("clip", "beyond the scale"),
      swatch("na", "no value"),
      swatch("sel", "selected"),
      h("span", { class: "sk-swatch" }, h("span", { class: "o" }, "grey"), "context, not trained on"),
      ...(under ? [h("span", { class: "sk-swatch" }, "underline: ", CHANNELS[under][0], ", ", h("span", { class: "u3" }, "above"), " ", h("span", { class: "d3" }, "below"), ` ${plain(this.domain(under)[0], 1)}`)] : []),
    );
  }

  drawCard() {
    const i = this.get("token");
    if (!(i >= 0 && i < this.count)) {
      this.card.replaceChildren(h("b", {}, "why this weight"), h("p", {}, "Click a token, or press an arrow key in the text."));
      return;
    }
    const { values: v, signals, method, data } = this;
    const bytes = data.bytes(this.ids[i]);
    const hex = [...bytes].map((b) => b.toString(16).padStart(2, "0")).join(" ");
    const beta = this.get("beta"), coef = this.get("coef");
    const value = (name, text) => h("tr", {}, h("th", {}, name), h("td", { "data-value": name }, text));
    const rows = [
      value("student s", plain(v.student[i])), value("teacher k", plain(v.teacher[i])), value("shift Δ", signed(v.delta[i])),
      value("gate", plain(v.gate[i])), value("advantage A", signed(v.advantage[i])), value("weight", signed(v.weight[i])),
      value("loss", signed(v.loss[i])),
    ];
    if (signals.kl) rows.push(value("full KL", plain(v.kl[i])));
    if (Number.isFinite(v.diff[i])) rows.push(value("diff", signed(v.diff[i])));
    if (data.meta.checkpoints.length) rows.push(value("checkpoint", signed(v.checkpoint[i])));
    this.card.replaceChildren(
      h("b", {}, "why this weight"),
      h("div", {}, h("code", { class: "sk-token" }, visible(bytes)), ` id ${this.ids[i]}, ${bytes.length} byte${bytes.length === 1 ? "" : "s"}`, h("small", {}, ` ${hex}`)),
      h("div", {}, `turn ${this.turnsOf[i] + 1}, token ${i + 1} of ${this.count}, ${this.kind(i)}`),
      h("div", { class: "sk-sum" }, explain(method, beta, coef, i, v, signals)),
      h("table", {}, h("tbody", {}, ...rows)),
      this.alternatives(i),
    );
  }

  /** What student and teacher would rather have said here. */
  alternatives(i) {
    const { data } = this;
    const k = data.meta.top;
    if (!k || this.skill < 0) return null;
    const place = this.skill * data.responses + this.trajectory.response_start + i;
    const columns = [0, 1].map((side) => {
      const at = place * 2 + side;
      const rank = data.alt_rank[at];
      const items = [...data.alt_ids.subarray(at * k, rank ? at * k + k : 0)].map((id, j) =>
        h("tr", { class: id === this.ids[i] ? "this" : null }, h("td", {}, visible(data.bytes(id))),
          h("td", {}, `${(100 * Math.exp(data.alt_logp[at * k + j])).toFixed(1)} %`)));
      return h("table", {}, h("caption", {}, `${side ? "with the skill" : "without"}: ${rank ? `rank ${rank}` : "–"}`), h("tbody", {}, ...items));
    });
    return h("div", { class: "sk-alternatives" }, ...columns);
  }

  showBooks() {
    const t = this.trajectory;
    const sum = this.values.loss.reduce((a, b) => a + b, 0);
    const mean = t.denominator ? sum / t.denominator : NaN;
    const words = [`Σ loss ${signed(sum)} over ${this.count} tokens; ÷ ${t.denominator} tokens of the batch = ${signed(mean, 9)}`];
    if (t.logged !== null) {
      const { method, beta, coef } = this.data.meta.logged;
      const same = method === this.get("method") && Math.abs(beta - this.get("beta")) < 1e-12 && Math.abs(coef - this.get("coef")) < 1e-12;
      const gap = mean - t.logged;
      const equal = Math.abs(gap) <= 1e-6 * Math.max(1, Math.abs(t.logged));
      words.push(`training logged ${signed(t.logged, 9)}`);
      words.push(!same ? `with ${method}, β ${beta}, λ ${coef}: choose these to compare` : equal ? "they agree" : `they differ by ${gap.toExponential(2)}`);
      this.books.dataset.agree = !same ? "other" : equal ? "yes" : "no";
    } else this.books.dataset.agree = "unlogged";
    this.books.textContent = words.join("; ");
  }

  drawTable() {
    const { values: v, data } = this;
    const size = 200;
    const columns = [["token", null], ["class", null], ["turn", null], ["student", v.student], ["teacher", v.teacher], ["Δ", v.delta],
      ["gate", v.gate], ["A", v.advantage], ["weight", v.weight], ["loss", v.loss]];
    const [key, down] = (this.sorting ??= [-1, true]);
    let order = Array.from({ length: this.count }, (_, i) => i);
    if (this.selected?.size) order = order.filter((i) => this.selected.has(i));
    const sorter = columns[key]?.[1];
    if (sorter) order.sort((a, b) => (nought(sorter[b]) - nought(sorter[a])) * (down ? 1 : -1) || a - b);
    const pages = Math.max(1, Math.ceil(order.length / size));
    const page = (this.page = clamp(this.page ?? 0, 0, pages - 1));
    const again = (changes) => () => {
      Object.assign(this, changes);
      this.drawTable();
    };
    const head = columns.map(([name, values], n) =>
      h("th", { "aria-sort": key === n ? (down ? "descending" : "ascending") : null },
        values ? h("button", { type: "button", onclick: again({ sorting: [n, key !== n || !down] }), title: `sort by ${name}` }, name) : name));
    const rows = order.slice(page * size, (page + 1) * size).map((i) =>
      h("tr", { "data-token": i, onclick: () => this.go(i, false) },
        h("td", {}, String(i + 1)), h("td", { class: "sk-token" }, visible(data.bytes(this.ids[i]))),
        h("td", {}, this.kind(i)), h("td", {}, String(this.turnsOf[i] + 1)),
        ...columns.slice(3).map(([, values]) => h("td", {}, plain(values[i])))));
    this.table.replaceChildren(
      h("div", {}, h("button", { type: "button", disabled: page === 0, onclick: again({ page: page - 1 }) }, "◂"),
        ` page ${page + 1} of ${pages} `, h("button", { type: "button", disabled: page === pages - 1, onclick: again({ page: page + 1 }) }, "▸")),
      h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "#"), ...head)), h("tbody", {}, ...rows)));
  }

  // --- charts ---

  drawHeat() {
    const turns = this.trajectory.turns.length;
    const sums = new Map();
    const kinds = this.data.kind.subarray(this.trajectory.response_start, this.trajectory.response_end);
    for (let i = 0; i < this.count; i++) {
      const key = kinds[i] * turns + this.turnsOf[i];
      const cell = sums.get(key) ?? { sum: 0, n: 0, tokens: [] };
      if (Number.isFinite(this.values.delta[i])) {
        cell.sum += Math.abs(this.values.delta[i]);
        cell.n += 1;
      }
      cell.tokens.push(i);
      sums.set(key, cell);
    }
    const [left, top, width, row] = [66, 16, 300, 15];
    const step = width / Math.max(1, turns);
    const svg = g("svg", { viewBox: `0 0 ${left + width + 4} ${top + CLASSES.length * row + 14}`, role: "grid", tabindex: 0, "aria-label": "mean size of Δ by token class and turn" });
    const half = this.domain("delta")[1] / 2;
    svg.append(label(0, 10, `mean |Δ| by class and turn, full colour at ${half} nats`, "sk-title"));
    const cells = [];
    for (const [k, name] of CLASSES.entries()) {
      svg.append(label(left - 4, top + k * row + 11, name, "sk-end"));
      for (let t = 0; t < turns; t++) {
        const cell = sums.get(k * turns + t);
        if (!cell) continue;
        const mean = cell.n ? cell.sum / cell.n : NaN;
        const share = Number.isFinite(mean) ? Math.min(1, mean / half) : 0;
        const words = `${name}, turn ${t + 1}: mean |Δ| ${plain(mean, 3)}, ${cell.tokens.length} tokens`;
        const rect = g("rect", { x: left + t * step, y: top + k * row, width: Math.max(1, step - 1), height: row - 1, class: "sk-cell", fill: `rgb(${UP})`, "fill-opacity": (0.06 + 0.8 * share).toFixed(3) });
        rect.append(g("title", {}, words));
        rect.tokens = cell.tokens;
        rect.words = words;
        cells.push(rect);
      }
    }
    svg.append(...cells, label(left, top + CLASSES.length * row + 11, turns ? "turn 1" : ""), label(left + width, top + CLASSES.length * row + 11, turns > 1 ? `turn ${turns}` : "", "sk-end"));
    this.pickable(svg, cells, false);
    this.heat.replaceChildren(svg);
  }

  drawHistogram() {
    const half = this.domain("delta")[1];
    const count = 31;
    const bins = Array.from({ length: count }, () => []);
    for (let i = 0; i < this.count; i++) {
      const d = this.values.delta[i];
      if (Number.isFinite(d)) bins[clamp(Math.floor(((d + half) / (2 * half)) * count), 0, count - 1)].push(i);
    }
    const [left, width, high, top] = [30, 336, 60, 16];
    const most = Math.max(1, ...bins.map((b) => b.length));
    const svg = g("svg", { viewBox: `0 0 ${left + width + 4} ${top + high + 16}`, role: "grid", tabindex: 0, "aria-label": "histogram of Δ, logarithmic counts" });
    svg.append(label(0, 10, "tokens by Δ (nats), logarithmic counts", "sk-title"), label(left - 4, top + 8, String(most), "sk-end"), label(left - 4, top + high, "0", "sk-end"));
    const step = width / count;
    const bars = bins.map((tokens, n) => {
      const low = -half + (2 * half * n) / count;
      const tall = tokens.length ? Math.max(2, (high * Math.log1p(tokens.length)) / Math.log1p(most)) : 0;
      const middle = low + half / count;
      const words = `Δ from ${n ? plain(low, 2) : "−∞"} to ${n < count - 1 ? plain(low + (2 * half) / count, 2) : "∞"}: ${tokens.length} tokens`;
      const group = g("g", { class: "sk-cell" },
        g("rect", { x: left + n * step, y: top, width: step, height: high, "fill-opacity": 0 }),
        g("rect", { x: left + n * step + 0.5, y: top + high - tall, width: step - 1, height: tall, fill: n === (count - 1) / 2 ? "rgb(128 128 128)" : `rgb(${middle < 0 ? DOWN : UP})` }),
        g("title", {}, words));
      group.tokens = tokens;
      group.words = words;
      return group;
    });
    svg.append(...bars, label(left, top + high + 12, plain(-half, 1)), label(left + width / 2, top + high + 12, "0", "sk-middle"), label(left + width, top + high + 12, plain(half, 1), "sk-end"));
    this.pickable(svg, bars, true);
    this.histogram.replaceChildren(svg);
  }

  /** Select tokens by clicking or dragging over cells, or by keyboard: arrows, Shift extends, Enter takes. */
  pickable(svg, cells, dragging) {
    let at = -1, anchor = -1, down = false;
    const between = () => cells.slice(Math.min(anchor, at), Math.max(anchor, at) + 1);
    const mark = () => {
      for (const cell of cells) cell.classList.remove("at");
      for (const cell of anchor < 0 ? [] : between()) cell.classList.add("at");
      if (at >= 0) svg.setAttribute("aria-label", cells[at].words);
    };
    const take = () => this.select(between().flatMap((c) => c.tokens).sort((a, b) => a - b));
    const under = (event) => cells.indexOf(event.target.closest(".sk-cell"));
    svg.addEventListener("pointerdown", (event) => {
      const n = under(event);
      if (n < 0) return;
      at = anchor = n;
      down = true;
      mark();
    });
    svg.addEventListener("pointermove", (event) => {
      const n = under(event);
      if (down && dragging && n >= 0) {
        at = n;
        mark();
      }
    });
    svg.addEventListener("pointerup", () => {
      if (down) take();
      down = false;
    });
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step && cells.length) {
        at = clamp(at + step, 0, cells.length - 1);
        if (!(event.shiftKey && dragging) || anchor < 0) anchor = at;
        mark();
      } else if (event.key === "Enter" && at >= 0) take();
      else if (event.key === "Escape") this.set("selection", []);
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
  }
}

/** The method's formula with a token's numbers put in. */
function explain(method, beta, coef, i, v, signals) {
  const n = (x) => plain(x, 3);
  const ratio = Math.exp(signals.student[i] - signals.behaviour[i]);
  const reached = Number.isFinite(v.delta[i]);
  if (!method.closed_form) return `weight = ${method.formula} = ${n(v.weight[i])}, computed in Python`;
  const parts = [];
  if (method.policy_gradient) {
    let a = n(v.advantage[i]);
    if (reached && method.shaping === "rlsd") a = `${a}·((1 − ${coef}) + ${coef}·clip(e^(${n(Math.sign(v.advantage[i]) * v.delta[i])}), ${1 - CLIP}, ${1 + CLIP}))`;
    if (reached && method.shaping === "opid") a = `(${a} + ${coef}·${n(v.delta[i])})`;
    parts.push(Math.abs(ratio - 1) > 1e-4 ? `ρ·${a}, ρ = ${n(ratio)}` : a);
  }
  if (method.term && reached) {
    const d = n(v.delta[i]), gate = n(v.gate[i]);
    parts.push({
      gated: `${coef}·σ(${beta}·${d}) [= ${coef}·${gate}]`,
      plain: `${coef}`,
      centred: `${coef}·(σ(${beta}·${d}) − ½) [= ${coef}·${n(v.gate[i] - 0.5)}]`,
      skill_sd: `${coef}·${n(ratio)}·${d}`,
      reverse_kl_sampled: `${coef}·${d}`,
    }[method.term]);
  }
  const missing = method.term || method.shaping ? !reached : false;
  return `weight = ${method.formula} = ${parts.join(" + ") || "0"} = ${plain(v.weight[i])}` + (missing ? " (no skill reached this token: no added term)" : "");
}

function label(x, y, text, cls = "") {
  return g("text", { x, y, class: cls }, text);
}

function join(parts) {
  const out = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const part of parts) {
    out.set(part, at);
    at += part.length;
  }
  return out;
}

const utf8 = (text) => new TextEncoder().encode(text);

/** Whether a range holds the whole of a node. */
function holds(range, node) {
  const all = document.createRange();
  all.selectNodeContents(node);
  return range.compareBoundaryPoints(Range.START_TO_START, all) <= 0 && range.compareBoundaryPoints(Range.END_TO_END, all) >= 0;
}

/** Text nodes of the trajectory itself: the blocks' text, not the headings. */
function* textNodes(root) {
  for (const block of root.querySelectorAll(".sk-block")) {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) yield walker.currentNode;
  }
}

function showFinds() {
  if (typeof Highlight === "function") CSS.highlights.set("sk-find", new Highlight(...[...finds.values()].flat()));
}

function render({ model, el }) {
  const root = h("div", { class: "sk", "data-lm-suppress-shortcuts": "true", tabindex: 0, role: "region", "aria-label": "skill inspector" });
  el.append(root);
  const view = new Inspector(model, root);
  requestAnimationFrame(() => view.current && view.reveal(view.current));
  return () => view.destroy();
}

export { numbers }; export default { render };
