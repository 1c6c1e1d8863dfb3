// The list of runs, live.
import { table } from "./table.js";
import { element, loss, whole } from "./words.js";

const by = (id) => document.getElementById(id);

export class List {
  start(found) {
    by("list").hidden = false;
    this.show(found);
    this.stream = new EventSource("api/events");
    this.stream.onopen = () => (by("connection").textContent = "live");
    this.stream.onerror = () => (by("connection").textContent = "the connection is lost; trying again ...");
    this.stream.addEventListener("runs", ({ data }) => this.show(JSON.parse(data)));
  }

  show({ runs }) {
    document.title = "Runs: Swarmentum";
    by("no-runs").hidden = runs.length > 0;
    table("runs", [["run"], ["phase"], ["step", "number"], ["loss", "number"], ["peers", "number"]], runs.map((it) => [
      element("a", { href: `#${it.run}` }, element("bdi", {}, it.name)), `${it.phase}${it.reason ? `: ${it.reason}` : ""}`, `${whole(it.step)} of ${whole(it.steps)}`, loss(it.loss), whole(it.peers),
    ]), runs.map((it) => it.run));
  }

  stop() {
    this.stream.close();
    by("list").hidden = true;
  }
}
