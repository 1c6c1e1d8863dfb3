// Where the page gets its data: from the API of a running page, or from the files of an exported one.

const JSON_FILES = { run: "data/run.json", steps: "data/steps.json", ledger: "data/ledger.json", invite: "data/invite.json", samples: "data/samples.json" };

async function got(address, kind) {
  const answer = await fetch(address, { cache: "no-cache" });
  if (!answer.ok) {
    const why = await answer.json().then((it) => it.error, () => answer.statusText);
    throw new Error(String(why));
  }
  return kind === "json" ? answer.json() : new Uint8Array(await answer.arrayBuffer());
}

export function source(run, isStatic) {
  const api = `api/runs/${run}`;
  return {
    json: (what, query = "") => got(isStatic ? JSON_FILES[what] : what === "run" ? api : `${api}/${what}${query}`, "json"),
    bytes: async (what, from) => {
      if (!isStatic) return got(what === "log" ? `${api}/log?from=${from}` : `${api}/${what}`);
      if (what !== "log") return got(`data/${what}.bin`);
      const index = await got("data/log/index.json", "json");
      return index.includes(from) ? got(`data/log/${from}.bin`) : new Uint8Array();
    },
    events: isStatic ? null : `${api}/events`,
  };
}
