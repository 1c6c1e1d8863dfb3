// What is trained, in a sentence or two, for somebody who comes from a link.
import { element, figures, whole } from "./words.js";

const OWN = "Python's own source code";

// Nodes; the operator's words stand in a <bdi>.
export function aboutOf(facts) {
  const it = facts.about;
  const own = (text) => element("bdi", {}, text);
  const size = facts.parameters === null ? "" : ` with ${figures(facts.parameters)} parameters`;
  const sources = it.data.flatMap((name, index) => [index > 0 ? ", " : "", own(name === "stdlib" ? OWN : name)]);
  const fork = facts.fork_of === null ? "" : ` It goes on from run ${facts.fork_of.slice(0, 16)}.`;
  return [
    "People train one neural network here together: a ", own(it.model), `${size}, on `, ...sources, " (tokens: ", own(it.tokenizer),
    `). A step has ${whole(it.batch_samples)} samples of ${whole(it.context)} tokens. Method: ${it.optimizer}; learning rate `,
    `${figures(it.lr)}, ${it.schedule}.${fork} `,
    element("a", { href: "#what-title" }, "What is this?"),
  ];
}
