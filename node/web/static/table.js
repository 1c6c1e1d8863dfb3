// A table with a head. On a phone each row becomes a card, so each cell names its column; the roles stay those of a table.
import { settle } from "./settle.js";
import { cell, element } from "./words.js";

const by = (id) => document.getElementById(id);

// `keys`: of the rows, one each, so that a row stays the same element when others come before it.
export function table(id, heads, rows, keys = []) {
  const head = heads.map(([name, kind]) => cell("th", name, { scope: "col", role: "columnheader", class: kind === "number" ? "number" : null }));
  by(id).setAttribute("role", "table");
  settle(by(id).querySelector("thead"), element("tr", { role: "row" }, ...head));
  const lines = rows.map((row, number) => {
    const cells = row.map((value, index) => {
      const label = { "data-label": heads[index][0], class: heads[index][1] === "number" ? "number" : null };
      if (index === 0 && value.localName === "a") return element("th", { scope: "row", role: "rowheader" }, value);
      if (value instanceof Node) return element("td", { ...label, role: "cell" }, value);
      if (index > 0) return cell("td", value, { ...label, role: "cell" });
      return cell("th", value, { scope: "row", role: "rowheader" });
    });
    return element("tr", { role: "row", "data-key": keys[number] ?? null }, ...cells);
  });
  settle(by(id).querySelector("tbody"), ...lines);
}
