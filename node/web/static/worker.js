// Checks the log beside the page. Messages in: {run, static} once, then {more: true}. Out: {state, ...} (see `say`).
import { crypts, DoesNotHold, LogVerifier } from "./verifier.js";
import { source } from "./source.js";

let verifier = null;
let busy = false;
let again = false;
const PAUSE_MS = 100;
let told = 0;

function say(state, more = {}) {
  self.postMessage({ state, by: verifier.crypt.name, ...verifier.sums(), ...more });
}

async function check() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    do {
      again = false;
      await verifier.advance(() => {
        if (Date.now() - told > PAUSE_MS) {
          told = Date.now();
          say("busy");
        }
      });
      say("good");
    } while (again);
  } catch (error) {
    if (error instanceof DoesNotHold) say("bad", { bad: error.step, why: error.message });
    else say("away", { why: error.message });
  }
  busy = false;
}

self.onmessage = async ({ data }) => {
  if (data.run !== undefined) {
    const at = source(data.run, data.static);
    verifier = new LogVerifier(data.run, at.bytes, await crypts());
  }
  if (verifier !== null) await check();
};
