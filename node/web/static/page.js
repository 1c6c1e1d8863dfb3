// The page: it asks the API once, then follows the live stream; the worker beside it checks the log.
import { aboutOf } from "./about.js";
import { Chart, speeds } from "./charts.js";
import { List } from "./list.js";
import { settle } from "./settle.js";
import { source } from "./source.js";
import { table } from "./table.js";
import { crypts, invited } from "./verifier.js";
import { bytes, element, figures, loss, moment, percent, span, whole } from "./words.js";

const STATIC_RUN = document.documentElement.dataset.run ?? null;
const RUN_ID = /^[0-9a-f]{64}$/;
const POINTS = 600;
const POINTS_MAX = 2000;
const FEED_MAX = 64;
const FAILURES_MAX = 8;
const by = (id) => document.getElementById(id);
const COLUMNS = ["steps", "loss", "tokens", "payload_bytes", "peers", "lr", "seen"];
const X = {
  steps: { label: "step", show: whole },
  tokens: { label: "tokens", show: figures },
  payload_bytes: { label: "bytes of votes", show: bytes },
  seen: { label: "time", show: moment, time: true },
};

// The name that a peer gives as its owner's.
function owner(it) {
  return it.owner ? element("bdi", {}, it.owner) : "-";
}

class Page {
  constructor(run) {
    this.run = run;
    this.at = source(run, STATIC_RUN !== null);
    this.steps = Object.fromEntries(COLUMNS.map((name) => [name, []]));
    this.charts = {
      loss: new Chart(by("chart-loss"), "loss, nats a token", loss),
      peers: new Chart(by("chart-peers"), "votes that counted", figures, true),
      speed: new Chart(by("chart-speed"), "steps a minute", figures),
    };
    this.proof = null;
    this.facts = null;
    this.worker = null;
    this.stopped = false;
  }

  async start() {
    by("run").hidden = false;
    by("run-id").textContent = this.run;
    if (STATIC_RUN === null) by("api").href = this.at.events.replace(/\/events$/, "");
    else by("api").closest("p").hidden = true;
    for (const radio of document.querySelectorAll("input[name=x]")) radio.onchange = () => this.drawLoss();
    by("compare").onsubmit = (event) => event.preventDefault();
    by("link").oninput = () => this.compare();
    by("copy").onclick = () => this.copy();
    by("samples").open = false;
    by("samples").ontoggle = () => this.showSamples();
    await this.reload();
    this.check();
    this.invite();
    if (this.at.events !== null) this.follow();
  }

  stop() {
    this.stopped = true;
    this.stream?.close();
    this.worker?.terminate();
    by("run").hidden = true;
  }

  async reload() {
    const [facts, steps, ledger] = await Promise.all([
      this.at.json("run"),
      this.at.json("steps", `?points=${POINTS}`),
      this.at.json("ledger"),
    ]);
    if (this.stopped) return;
    this.steps = Object.fromEntries(COLUMNS.map((name) => [name, steps[name]]));
    this.ledger = ledger;
    this.show(facts);
    this.draw();
    this.showLedger();
  }

  follow() {
    this.stream = new EventSource(this.at.events);
    let before = false;
    this.stream.onopen = () => {
      this.connected("live");
      if (before) this.reload().catch(() => {});
      before = true;
    };
    this.stream.onerror = () => this.connected(this.stream.readyState === EventSource.CLOSED
      ? "this run is shown here no more: reload the page" : "the connection is lost; trying again ...");
    this.stream.addEventListener("run", ({ data }) => {
      this.show(JSON.parse(data));
      this.worker?.postMessage({ more: true });
    });
    this.stream.addEventListener("steps", ({ data }) => this.append(JSON.parse(data)));
  }

  connected(words) {
    by("connection").textContent = words;
  }

  append(more) {
    const last = this.steps.steps.at(-1) ?? 0;
    more.steps.forEach((step, index) => {
      if (step > last) for (const name of COLUMNS) this.steps[name].push(more[name][index]);
    });
    if (this.steps.steps.length > POINTS_MAX) {
      this.reload().catch(() => {});
      return;
    }
    this.draw();
  }

  draw() {
    this.drawLoss();
    const steps = { ...X.steps, values: this.steps.steps };
    this.charts.peers.draw(steps, this.steps.peers);
    this.charts.speed.draw(steps, speeds(this.steps));
  }

  drawLoss() {
    const name = document.querySelector("input[name=x]:checked").value;
    by("no-time").hidden = name !== "seen";
    this.charts.loss.draw({ ...X[name], time: X[name].time === true, values: this.steps[name] }, this.steps.loss, this.heldOut());
  }

  // The held-out losses, each in the row of the chart that its step is in.
  heldOut() {
    const rows = this.steps.steps;
    const found = rows.map(() => null);
    for (const it of this.facts?.held_out ?? []) {
      const row = rows.findIndex((step) => step >= it.step);
      if (row >= 0) found[row] = it.loss;
    }
    return found;
  }

  show(facts) {
    this.facts = facts;
    document.title = `${facts.name}: step ${facts.step} of ${facts.steps}`;
    by("name").textContent = facts.name;
    const why = facts.reason.replace(`${facts.phase}: `, "");
    by("phase").textContent = `${facts.phase}${why ? `: ${why}` : ""}`;
    const problems = [facts.problem, facts.unconfirmed].filter(Boolean).join("; ");
    by("problem").hidden = problems === "";
    by("problem").textContent = problems;
    by("progress").max = Math.max(facts.steps, 1);
    by("progress").value = facts.step;
    const left = facts.seconds_left === null ? "" : `, ${span(facts.seconds_left)} left at this speed`;
    by("step").textContent = `step ${whole(facts.step)} of ${whole(facts.steps)}${left}`;
    this.showFigures(facts);
    this.showPeers(facts);
    this.showAbout(facts);
    by("written").hidden = facts.written === null;
    if (facts.written !== null) {
      if (this.shownSample !== facts.written.step) this.showSamples();
      by("written-note").textContent = `After step ${whole(facts.written.step)}, as peer ${facts.written.peer.slice(-8)} says. Nobody checks this text.`;
      by("written-text").textContent = facts.written.text;
    }
    settle(by("feed"), ...facts.events.slice(-FEED_MAX).reverse().map((it) => {
      const when = `step ${whole(it.step)}${it.seen === null ? "" : `, ${moment(it.seen)}`}`;
      return element("li", { "data-key": it.number }, element("span", { class: "when" }, when), element("bdi", {}, it.text));
    }));
    this.compareSums();
    const told = facts.events.findLast((it) => it.kind === "excluded" || it.kind === "readmitted")?.number ?? 0;
    if (this.told !== undefined && told > this.told) this.renewLedger();
    this.told = told;
  }

  showAbout(facts) {
    by("about").hidden = facts.about === null;
    if (facts.about === null) return;
    settle(by("about"), ...aboutOf(facts));
    by("about").querySelector("a").onclick = (event) => {
      event.preventDefault(); // the hash of the address names the run
      by("what-title").scrollIntoView();
    };
  }

  async showSamples() {
    if (!by("samples").open) return;
    this.shownSample = this.facts.written?.step;
    try {
      const { samples } = await this.at.json("samples");
      settle(by("samples-list"), ...samples.slice(0, -1).reverse().flatMap((it) => [
        element("p", { class: "small" }, `After step ${whole(it.step)}, as peer ${it.peer.slice(-8)} says.`),
        element("pre", { dir: "auto" }, it.text),
      ]));
      if (samples.length < 2) settle(by("samples-list"), element("p", { class: "small" }, "This is the first one."));
    } catch (error) {
      by("samples-list").textContent = `They cannot be read: ${error.message}`;
    }
  }

  async renewLedger() {
    try {
      this.ledger = await this.at.json("ledger");
      this.showLedger();
    } catch {
      this.told = 0; // the next message tries again
    }
  }

  showFigures(facts) {
    const each = facts.payload_bytes_each;
    const reduce = facts.allreduce_bytes_each;
    const times = each !== null && reduce !== null && each > 0 ? `${figures(reduce / each)} times less` : "-";
    const held = facts.held_out.at(-1);
    const lines = [
      ["loss", loss(facts.loss)],
      ["held-out loss", held === undefined ? "-" : `${loss(held.loss)} at step ${whole(held.step)}, ${held.peers} peers${held.agrees ? "" : `, which differ by ${held.spread.toFixed(4)}: a peer is wrong, or lies`}`],
      ["peers connected", whole(facts.peers_connected)],
      ["votes that counted", whole(facts.votes)],
      ["tokens", figures(facts.tokens)],
      ["tokens a second", figures(facts.tokens_per_second)],
      ["steps a minute", figures(facts.steps_per_minute)],
      ["a peer's votes of a step", bytes(each)],
      ["against an fp32 all-reduce", times],
      ["bytes of all votes", bytes(facts.payload_bytes)],
      ["parameters", figures(facts.parameters)],
      ["agreed snapshot", facts.snapshot_step === null ? "none yet" : `step ${whole(facts.snapshot_step)}`],
      ["who may join", facts.admission.replace("_", " ") || "-"],
    ];
    settle(by("figures"), ...lines.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  }

  showPeers(facts) {
    const away = facts.peers_known - facts.peers_connected;
    const more = facts.peers_known > facts.peers.length ? `; the first ${facts.peers.length} are shown` : "";
    const line = facts.in_line > 0 ? `, ${facts.in_line} waiting in line for a place` : "";
    by("peers-note").textContent = `${facts.peers_connected} connected, ${away} away${line}${more}. Devices are named as their owners' programs name them.`;
    const failures = facts.failures.slice(0, FAILURES_MAX).map((it) => `${it.count} for ${it.reason} (version ${it.version})`).join(", ");
    by("failures").hidden = failures === "";
    by("failures").textContent = `Could not join, as they say: ${failures}.`;
    const heads = [["peer"], ["claimed owner"], ["phase"], ["last seen"], ["link"], ["device"], ["version"], ["standing"], ["share", "number"], ["samples/s", "number"], ["loss", "number"], ["last vote", "number"], ["votes", "number"]];
    const rows = facts.peers.map((it) => [
      it.id.slice(-8),
      owner(it),
      [it.phase, it.anchor ? "anchor" : "", it.paused ? "paused" : ""].filter(Boolean).join(", "),
      it.phase !== "absent" ? "now" : it.seen === null ? "-" : moment(it.seen),
      it.phase === "absent" ? "-" : it.relayed ? "relayed" : "direct",
      it.device || "-",
      it.version || "-",
      it.standing_reason ? `${it.standing}: ${it.standing_reason}` : it.standing || "-",
      percent(it.share),
      figures(it.samples_per_second),
      loss(it.loss),
      it.last_step ? whole(it.last_step) : "-",
      whole(it.votes_accepted),
    ]);
    table("peers", heads, rows, facts.peers.map((it) => it.id));
    by("peers").querySelectorAll("tbody th").forEach((head, index) => head.setAttribute("title", facts.peers[index].id));
  }

  showLedger() {
    const proven = this.proof !== null && this.proof.state === "good";
    const lines = proven ? this.proof.accounts : this.ledger.identities;
    const total = proven ? this.proof.identities : this.ledger.total;
    const step = proven ? this.proof.step : this.ledger.to_step;
    const source = proven ? "added up by your browser from the entries that it verified" : "as this page's server added it up";
    by("ledger-note").textContent = `Steps 1 to ${whole(step)}, ${source}. ${whole(total)} identities${total > lines.length ? `, the first ${lines.length} are shown` : ""}.`;
    const heads = [["identity"], ["claimed owner"], ["votes", "number"], ["samples", "number"], ["tokens", "number"], ["payloads", "number"], ["steps"], ["uptime", "number"]];
    const owned = new Map(this.ledger.identities.map((it) => [it.id, owner(it)]));
    table("ledger", heads, lines.map((it) => [
      it.id, owned.get(it.id) ?? "-", whole(it.votes_accepted), whole(it.samples), whole(it.tokens), bytes(it.payload_bytes),
      `${whole(it.first_step)} to ${whole(it.last_step)}`, percent(it.uptime),
    ]), lines.map((it) => it.id));
    by("by-owner").hidden = this.ledger.owners.length === 0;
    const sums = [["claimed owner"], ["identities", "number"], ["votes", "number"], ["samples", "number"], ["tokens", "number"], ["payloads", "number"]];
    table("owners", sums, this.ledger.owners.map((it) => [
      element("bdi", {}, it.name), whole(it.identities),
      whole(it.votes_accepted), whole(it.samples), whole(it.tokens), bytes(it.payload_bytes),
    ]));
    const out = this.ledger.exclusions.map((it) => {
      const evidence = it.by_operator ? "the operator's decision" : it.proven ? "both signed announcements are in the log" : `${it.verdicts} verdicts of ${it.checkers} peers`;
      const back = it.readmitted_step === null ? "" : `; admitted again in step ${whole(it.readmitted_step)}`;
      return element("p", { class: "small" }, element("bdi", {}, `Step ${whole(it.step)}: ${it.id} is excluded: ${it.reason} (${evidence}${back})`));
    });
    settle(by("exclusions"), ...out);
  }

  check() {
    this.worker = new Worker("worker.js", { type: "module" });
    this.worker.onmessage = ({ data }) => this.proved(data);
    this.worker.onerror = () => this.proved({ state: "away", why: "this browser cannot run the check (module workers)", step: 0 });
    this.worker.postMessage({ run: this.run, static: STATIC_RUN !== null });
  }

  proved(proof) {
    this.proof = proof;
    const entries = `${whole(proof.step)} ${proof.step === 1 ? "entry" : "entries"}`;
    const head = Math.max(this.facts.step, proof.step, 1);
    by("proof").dataset.state = proof.state;
    by("proof").dataset.step = proof.step;
    by("proof-progress").max = head;
    by("proof-progress").value = proof.step;
    by("proof-text").textContent = {
      busy: `Your browser checks the log: ${entries} of ${whole(head)} ...`,
      good: `${entries} verified by your browser`,
      bad: `The log does not hold: ${proof.why}. ${entries} before it hold.`,
      away: `The check stopped after ${entries}: ${proof.why}`,
    }[proof.state];
    if (proof.key) by("key").textContent = proof.key;
    this.compareSums();
    if (proof.state === "good") this.showLedger();
  }

  compareSums() {
    const { proof, facts } = this;
    if (proof === null || facts === null || proof.votes === undefined) return;
    const sums = `${whole(proof.votes)} votes, ${figures(proof.tokens)} tokens, ${bytes(proof.payload_bytes)} of payloads, by ${proof.by}.`;
    if (proof.step !== facts.step || proof.state !== "good") {
      by("proof-sums").textContent = sums;
      return;
    }
    const equal = proof.votes === facts.votes && proof.tokens === facts.tokens && proof.payload_bytes === facts.payload_bytes;
    by("proof-sums").textContent = `${sums} ${equal ? "The figures of this page are the same." : "THE FIGURES OF THIS PAGE DIFFER: do not trust them."}`;
    by("proof").dataset.equal = equal;
    if (!equal) by("proof").dataset.state = "bad";
  }

  async compare() {
    const link = by("link").value;
    if (link.trim() === "") {
      by("compared").textContent = "";
      return;
    }
    try {
      const named = await invited(link, await crypts());
      const run = named.run === this.run;
      const key = !this.proof?.key || named.key === this.proof.key;
      by("compared").textContent = run && key ? "Your link means this run." : run ? "Your link names another coordinator's key." : `Your link means another run: ${named.run}`;
    } catch (error) {
      by("compared").textContent = error.message;
    }
  }

  async invite() {
    try {
      const { invite, admits } = await this.at.json("invite");
      if (this.facts.phase === "finished") {
        by("admits").textContent = "The run is finished. This shows it in a terminal:";
        by("command").textContent = `swarmentum status ${invite}`;
        return;
      }
      by("admits").textContent = admits
        ? "Anybody with this link may train with the others. Install Swarmentum, then:"
        : "This link shows the run; it admits nobody new. Ask the operator for an invite.";
      by("command").textContent = `swarmentum ${admits ? "join" : "status"} ${invite}`;
    } catch (error) {
      by("admits").textContent = `The link is not shown here: ${error.message}`;
      by("command").closest(".copy").hidden = true;
    }
  }

  async copy() {
    try {
      await navigator.clipboard.writeText(by("command").textContent);
      by("copied").textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(by("command"));
      by("copied").textContent = "Selected: copy it with your keyboard.";
    }
  }
}

let shown = null;

async function route() {
  shown?.stop();
  shown = null;
  by("missing").hidden = true;
  const named = STATIC_RUN ?? location.hash.slice(1);
  try {
    if (RUN_ID.test(named)) {
      shown = new Page(named);
      await shown.start();
      return;
    }
    const answer = await fetch("api/runs", { cache: "no-cache" });
    const found = await answer.json();
    if (found.total === 1 && named !== "runs") {
      shown = new Page(found.runs[0].run);
      await shown.start();
      return;
    }
    shown = new List();
    shown.start(found);
  } catch (error) {
    by("missing").hidden = false;
    by("missing").textContent = `This page has no answer: ${error.message}`;
  }
}

if (STATIC_RUN !== null) by("home").removeAttribute("href");
addEventListener("hashchange", route);
route();
