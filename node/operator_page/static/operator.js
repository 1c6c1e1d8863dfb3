// The operator's page. Each request carries the cookie, which scripts cannot read, and the token, which other ports cannot read.
import { cell, element, loss, moment, whole } from "./words.js";

const TOKEN = "swarmentum-operator-token";
const LOOK_MS = 3000;
const RUN_ID = /^#run=([0-9a-f]{64})$/;
const LOGIN = /^#login=([\w-]{20,128})$/;
const by = (id) => document.getElementById(id);
let run = null;
let facts = null;
let timer = null;
let looks = 0;

class Refused extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

async function post(path, values) {
  const token = sessionStorage.getItem(TOKEN) ?? "";
  let answer;
  let body;
  try {
    answer = await fetch(`api/${path}`, {
      method: "POST",
      credentials: "same-origin",
      cache: "no-store",
      headers: { "content-type": "application/json", "x-swarmentum-token": token },
      body: JSON.stringify(values),
    });
    body = await answer.json();
  } catch {
    throw new Refused(0, "The page's server does not answer. Is the coordinator running?");
  }
  if (!answer.ok) throw new Refused(answer.status, body.error ?? `status ${answer.status}`);
  return body;
}

const ask = (what, values = {}, of = run) => post("ask", { what, run: of ?? "", values });

function away(why = "") {
  clearTimeout(timer);
  looks += 1;
  sessionStorage.removeItem(TOKEN);
  by("inside").hidden = true;
  by("session").textContent = "";
  by("away").hidden = false;
  by("away-why").hidden = why === "";
  by("away-why").textContent = why;
}

function say(words, good = true, copied = null) {
  by("answer").hidden = words === "";
  by("answer").dataset.good = good;
  by("answer").textContent = words;
  by("copy-box").hidden = copied === null;
  by("copy-text").textContent = copied ?? "";
  if (copied !== null) by("copy-box").scrollIntoView({ block: "center" });
}

// One action: its answer or its error is shown, and then what the coordinator has now.
async function act(what, values) {
  for (const button of document.querySelectorAll("#inside button")) button.disabled = true;
  say(`${what} ...`);
  try {
    const answer = await ask(what, values);
    say(answer.said, true, answer.copy ?? answer.secret ?? null);
    return answer;
  } catch (error) {
    failed(error);
    return null;
  } finally {
    for (const button of document.querySelectorAll("#inside button")) button.disabled = false;
    await look();
  }
}

function failed(error) {
  if (!(error instanceof Refused)) throw error;
  if (error.status === 401 || error.status === 403) away(error.message);
  else say(error.message, false);
}

function sure(words) {
  by("sure-text").textContent = words;
  by("sure").showModal();
  return new Promise((resolve) => {
    const end = (answer) => {
      by("sure").onclose = null;
      if (by("sure").open) by("sure").close();
      resolve(answer);
    };
    by("sure-yes").onclick = () => end(true);
    by("sure-no").onclick = () => end(false);
    by("sure").onclose = () => end(false);
  });
}

const drawn = new Map();

// Rows replace what is shown only if their values changed, so that a button keeps the keyboard's focus.
function table(id, heads, values, row) {
  const text = JSON.stringify(values);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  const rows = values.map(row);
  const head = heads.map((name) => cell("th", name, { scope: "col", role: "columnheader" }));
  by(id).setAttribute("role", "table");
  by(id).querySelector("thead").replaceChildren(element("tr", { role: "row" }, ...head));
  by(id).querySelector("tbody").replaceChildren(...rows.map((row) => element("tr", { role: "row" }, ...row.map((value, index) => {
    const label = { "data-label": heads[index] };
    if (value instanceof Node) return element("td", { ...label, role: "cell" }, value);
    return index > 0 ? cell("td", value, { ...label, role: "cell" }) : cell("th", value, { scope: "row", role: "rowheader" });
  }))));
}

function button(words, name, action) {
  const made = element("button", { type: "button", "aria-label": name }, words);
  made.onclick = action;
  return made;
}

// What the coordinator has now; at most one look counts, the newest.
async function look() {
  clearTimeout(timer);
  const mine = (looks += 1);
  try {
    const [shown, log] = await Promise.all([run === null ? ask("runs") : ask("run"), ask("log", {}, null)]);
    if (mine !== looks) return;
    by("session").textContent = `session ${log.session}, until ${moment(Date.now() / 1000 + log.seconds_left)}`;
    showLog(log.actions);
    if (run === null) showRuns(shown.runs);
    else showRun(shown);
  } catch (error) {
    if (mine !== looks) return;
    failed(error);
    if (error.status === 401 || error.status === 403) return;
  }
  timer = setTimeout(() => (document.hidden ? wait() : look()), LOOK_MS);
}

function wait() {
  timer = setTimeout(() => (document.hidden ? wait() : look()), LOOK_MS);
}

function showRuns(runs) {
  by("no-runs").hidden = runs.length > 0;
  table("runs", ["run", "phase", "step", "loss", "peers"], runs, (it) => [
    element("a", { href: `#run=${it.run}` }, element("bdi", {}, it.name)),
    `${it.phase}${it.reason ? `: ${it.reason}` : ""}`, `${whole(it.step)} of ${whole(it.steps)}`, it.step ? loss(it.loss) : "-", whole(it.peers.length),
  ]);
}

function showRun(it) {
  facts = it;
  by("name").textContent = it.name;
  by("phase").textContent = `${it.phase}${it.reason ? `: ${it.reason}` : ""}`;
  by("step").textContent = `step ${whole(it.step)} of ${whole(it.steps)}${it.loss === null ? "" : `, loss ${loss(it.loss)}`}`;
  by("run-id").textContent = it.run;
  by("link").textContent = it.link;
  by("tickets").hidden = it.admission !== "invite" && it.invites.length === 0;
  by("admission").textContent = it.admission === "open"
    ? "Anybody with this link may join:"
    : `Admission mode ${it.admission.replace("_", " ")}: this link shows the run, and admits nobody new.`;
  by("orders-box").hidden = it.operators === 0;
  by("orders-note").textContent = `This run obeys ${it.needed} of its ${it.operators} operators. `
    + (it.signs ? "The coordinator's own key is one of them: this page signs with it." : "The coordinator's own key is none of them, so this page signs nothing: use `swarmentum-coordinator order sign`.");
  table("orders", ["order", "says", "signed by", "until", ""], it.orders, (row) => [
    row.order.slice(0, 12), row.says, `${row.signed_by.length} of ${row.needed}: ${row.signed_by.map((key) => key.slice(-8)).join(", ")}`, row.expires,
    it.signs ? button("Sign ...", `Sign order ${row.order.slice(0, 12)}`, () => signOrder(row)) : "-",
  ]);
  by("peers-note").textContent = it.peers_known > it.peers.length ? `The first ${it.peers.length} of ${it.peers_known} are shown.` : "";
  table("peers", ["peer", "phase", "standing", "step", "votes", "device", ""], it.peers, (peer) => [
    peer.id, peer.phase, peer.standing_reason ? `${peer.standing}: ${peer.standing_reason}` : peer.standing || "-", whole(peer.applied_step), whole(peer.votes_accepted), peer.device || "-",
    peer.standing === "excluded"
      ? button("Readmit", `Readmit ${peer.id}`, () => act("readmit", { peer: peer.id }))
      : button("Exclude ...", `Exclude ${peer.id}`, () => { by("peer").value = peer.id; by("peer-reason").focus(); }),
  ]);
  table("settings", ["setting", "value", "since"], it.settings, (row) => [
    row.key, JSON.stringify(row.value), row.from_step > 1 ? `step ${whole(row.from_step)}` : "the beginning",
  ]);
  table("invites", ["invite", "label", "state", "uses left", "expires", ""], it.invites, (row) => [
    row.ticket.slice(0, 8), row.label || "-", row.state, `${row.uses_left} of ${row.uses}`, row.expires ?? "never",
    row.state === "revoked" ? "-" : button("Revoke ...", `Revoke invite ${row.ticket.slice(0, 8)}`, () => revoke(row)),
  ]);
}

async function signOrder(row) {
  if (await sure(`Sign the order to ${row.says}? With enough signatures it counts at once. The signed log keeps it for ever.`)) await act("sign", { order: row.order });
}

async function revoke(row) {
  const words = `Revoke the invite ${row.ticket.slice(0, 8)}? It admits nobody else. Peers that joined with it stay. This cannot be undone.`;
  if (await sure(words)) await act("revoke", { invite: row.ticket, and_its_peers: false });
}

function showLog(actions) {
  table("actions", ["number", "when", "session", "action", "run", "values", "outcome"], actions, (it) => [
    it.number, moment(it.time), it.session, it.action, it.run ? it.run.slice(0, 16) : "-", JSON.stringify(it.values), it.outcome,
  ]);
}

function form(id, action) {
  by(id).onsubmit = (event) => {
    event.preventDefault();
    action();
  };
}

const toml = () => ({ text: by("toml").value, anchor: by("anchor").checked, layout: by("layout").checked });

// A check, or a new run; the mistakes, each with its line, stand beside the text.
async function make(what) {
  by("mistakes").hidden = by("found").hidden = true;
  const answer = await act(what, toml());
  if (answer === null) {
    by("mistakes").hidden = by("inside").hidden;
    by("mistakes").textContent = by("answer").textContent;
    return;
  }
  by("found").hidden = false;
  table("costs", ["", ""], answer.rows ?? [], (row) => row);
  by("notes").replaceChildren(...answer.notes.map((note) => element("li", {}, note)));
  if (answer.secret) by("notes").prepend(element("li", {}, "Start the anchor with the command above, beside the coordinator. Keep it to yourself."));
  if (answer.run) location.hash = `#run=${answer.run}`;
}

function listen() {
  by("pause").onclick = () => act("pause", { reason: by("reason").value });
  by("resume").onclick = () => act("resume", {});
  by("finish").onclick = async () => {
    if (await sure(`Finish the run ${facts.name} at step ${facts.step}, for good? This cannot be undone.`)) await act("finish", { reason: by("reason").value });
  };
  form("exclude-form", async () => {
    const values = { peer: by("peer").value.trim(), reason: by("peer-reason").value };
    if (!(await sure(`Exclude the peer ${values.peer}? The signed log keeps the reason for ever; readmitting does not remove it.`))) return;
    if (await act("exclude", values)) by("exclude-form").reset();
  });
  form("change-form", async () => {
    const settings = by("changes").value.split("\n").map((line) => line.trim()).filter((line) => line !== "");
    if (!(await sure(`Change ${settings.join(", ")}? The signed log keeps each change for ever.`))) return;
    if (await act("change", { settings })) by("change-form").reset();
  });
  form("invite-form", () => act("invite", { uses: Number(by("uses").value), expires: by("expires").value.trim(), label: by("label").value }));
  by("check").onclick = () => make("check");
  form("create-form", async () => {
    if (await sure("Create this run? Its settings are its definition; only some of them change later.")) await make("create");
  });
  by("logout").onclick = async () => {
    await post("logout", {}).catch(() => {});
    away("You are logged out.");
  };
  by("copy").onclick = async () => {
    try {
      await navigator.clipboard.writeText(by("copy-text").textContent);
    } catch {
      getSelection().selectAllChildren(by("copy-text"));
    }
  };
}

async function route() {
  const secret = location.hash.match(LOGIN)?.[1];
  if (secret !== undefined) {
    history.replaceState(null, "", location.pathname); // the secret leaves the address bar and the history
    try {
      sessionStorage.setItem(TOKEN, (await post("login", { secret })).token);
    } catch (error) {
      away(error.message);
      return;
    }
  }
  if (sessionStorage.getItem(TOKEN) === null) {
    away();
    return;
  }
  run = location.hash.match(RUN_ID)?.[1] ?? null;
  by("away").hidden = true;
  by("inside").hidden = false;
  by("list").hidden = run !== null;
  by("run").hidden = run === null;
  by("create").hidden = run !== null;
  await look();
}

listen();
addEventListener("hashchange", () => {
  if (!location.hash.startsWith("#main")) route();
});
route();
