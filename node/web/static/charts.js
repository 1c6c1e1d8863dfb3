// A line chart by uPlot, and the same figures as a table beside it.
import { settle } from "./settle.js";
import { cell, element, figures } from "./words.js";

const HEIGHT = 240;
const ROWS_MAX = 60;
const SPEED_SECONDS_MIN = 5;
const BESIDE = "held out";
const COUNTS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export class Chart {
  // `label`: of the values; `show`: a value as text; `counts`: whole numbers, on an axis from 0.
  constructor(place, label, show, counts = false) {
    this.counts = counts;
    this.place = place;
    this.label = label;
    this.show = show;
    this.plot = null;
    this.picture = element("div", { role: "img" });
    this.table = element("table");
    this.details = element("details", {}, element("summary", {}, "Show as a table"));
    this.details.append(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, this.table));
    place.replaceChildren(this.picture, this.details);
    new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height: HEIGHT })).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.again());
    this.details.addEventListener("toggle", () => this.rows());
  }

  width() {
    return Math.max(this.place.clientWidth, 200);
  }

  // `x`: {label, values, time, show}; `y`: values, null where there is none; `beside`: more values, as points.
  draw(x, y, beside = []) {
    const fits = y.map((value, index) => index).filter((index) => y[index] !== null && x.values[index] !== null);
    this.x = { ...x, values: fits.map((index) => x.values[index]) };
    this.y = fits.map((index) => y[index]);
    const more = fits.map((index) => beside[index] ?? null);
    this.beside = more.some((value) => value !== null) ? more : null;
    const last = this.y.at(-1);
    const words = last === undefined ? "no values yet" : `last value ${this.show(last)}`;
    this.picture.setAttribute("aria-label", `${this.label} against ${x.label}: ${words}. The table below has the values.`);
    const key = `${x.label} ${x.time} ${this.beside !== null}`;
    if (this.plot === null || this.key !== key) this.again();
    else this.plot.setData(this.columns());
    this.key = key;
    if (this.details.open) this.rows();
  }

  columns() {
    return this.beside === null ? [this.x.values, this.y] : [this.x.values, this.y, this.beside];
  }

  again() {
    this.plot?.destroy();
    this.plot = null;
    if (this.x === undefined) return;
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    const options = {
      width: this.width(),
      height: HEIGHT,
      scales: { x: { time: this.x.time }, ...(this.counts ? { y: { range: (_, low, high) => [0, Math.max(high ?? 1, 1) * 1.1] } } : {}) },
      axes: [
        { ...axis, label: this.x.label, values: this.x.time ? undefined : (_, all) => all.map((it) => figures(it)) },
        { ...axis, label: this.label, size: 60, labelSize: 20, ...(this.counts ? { incrs: COUNTS } : {}) },
      ],
      series: [
        { label: this.x.label, value: (_, it) => (it === null ? "-" : this.x.show(it)) },
        { label: this.label, stroke: colour("--one"), width: 2, points: { show: this.y.length < 3 }, value: (_, it) => (it == null ? "-" : this.show(it)) },
      ],
    };
    if (this.beside !== null) {
      options.series.push({ label: BESIDE, stroke: colour("--two"), width: 2, spanGaps: true, points: { show: true }, value: (_, it) => (it == null ? "-" : this.show(it)) });
    }
    if (this.x.time) delete options.axes[0].values;
    this.plot = new window.uPlot(options, this.columns(), this.picture);
  }

  rows() {
    if (!this.details.open || this.x === undefined) return;
    const width = Math.max(Math.ceil(this.y.length / ROWS_MAX), 1);
    const picked = this.y.map((_, index) => index).filter((index) => (this.y.length - 1 - index) % width === 0 || (this.beside ?? [])[index] != null);
    const head = element("tr", {}, cell("th", this.x.label, { scope: "col" }), cell("th", this.label, { scope: "col" }));
    if (this.beside !== null) head.append(cell("th", BESIDE, { scope: "col" }));
    const body = picked.map((index) => {
      const row = element("tr", {}, cell("td", this.x.show(this.x.values[index])), cell("td", this.show(this.y[index])));
      if (this.beside !== null) row.append(cell("td", this.beside[index] === null ? "-" : this.show(this.beside[index])));
      return row;
    });
    const caption = element("caption", {}, width === 1 ? "All values" : `Every ${width}th value`);
    settle(this.table, caption, element("thead", {}, head), element("tbody", {}, ...body));
  }
}

// Steps a minute before each step, over at least SPEED_SECONDS_MIN; null where nobody saw the steps come.
export function speeds({ steps, seen }) {
  let from = 0;
  return seen.map((now, index) => {
    if (now === null || seen[from] === null) {
      from = index;
      return null;
    }
    if (now === seen[index + 1]) return null; // one look found both
    while (from + 1 < index && now - seen[from + 1] >= SPEED_SECONDS_MIN) from += 1;
    const seconds = now - seen[from];
    return seconds >= SPEED_SECONDS_MIN ? (60 * (steps[index] - steps[from])) / seconds : null;
  });
}
