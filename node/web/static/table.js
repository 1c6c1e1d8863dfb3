// A table with a head. On a phone each row becomes a card, so each cell names its column; the roles stay those of a table.
import { cell, element } from "./words.js";

const by = (id) => document.getElementById(id);

export function table(id, heads, rows) {
  const head = heads.map(([name, kind]) => cell("th", name, { scope: "col", role: "columnheader", class: kind === "number" ? "number" : null }));
  by(id).setAttribute("role", "table");
  by(id).querySelector("thead").replaceChildren(element("tr", { role: "row" }, ...head));
  const lines = rows.map((row) => {
    const cells = row.map((value, index) => {
      const label = { "data-label": heads[index][0], class: heads[index][1] === "number" ? "number" : null };
      if (value instanceof Node) return element("td", { ...label, role: "cell" }, value);
      if (index > 0) return cell("td", value, { ...label, role: "cell" });
      return cell("th", value, { scope: "row", role: "rowheader" });
    });
    return element("tr", { role: "row" }, ...cells);
  });
  by(id).querySelector("tbody").replaceChildren(...lines);
}
