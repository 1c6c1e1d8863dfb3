// Elements and words. Text always enters the page as text, never as markup.

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A cell; strangers' words stand in a <bdi>, so that their direction of writing ends with them.
export function cell(kind, text, attributes = {}) {
  return element(kind, attributes, element("bdi", {}, String(text)));
}

const UNITS = ["", " k", " M", " G", " T", " P", " E"];

// Three digits and a unit.
export function figures(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "-";
  if (Math.abs(value) < 10000) return Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 4 });
  let power = 0;
  while (Math.abs(value) >= 999.5 && power < UNITS.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${value.toPrecision(3)}${UNITS[power]}`;
}

export function whole(value) {
  return value === null || value === undefined ? "-" : value.toLocaleString("en");
}

export function bytes(value) {
  if (value === null || value === undefined) return "-";
  if (value < 1000) return `${Math.round(value)} B`;
  if (value < 10000) return `${(value / 1000).toPrecision(3)} kB`;
  return `${figures(value)}B`;
}

export function loss(value) {
  return value === null || value === undefined ? "-" : value.toFixed(4);
}

export function percent(value) {
  return `${(100 * value).toFixed(1)} %`;
}

export function moment(seconds) {
  return seconds === null ? "-" : new Date(1000 * seconds).toLocaleString();
}

export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "-";
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  if (first < 0) return "0 s";
  const [size, unit] = parts[first];
  const count = Math.floor(seconds / size);
  const next = parts[first + 1];
  const rest = next === undefined ? 0 : Math.floor((seconds - count * size) / next[0]);
  return rest > 0 ? `${count} ${unit} ${rest} ${next[1]}` : `${count} ${unit}`;
}
