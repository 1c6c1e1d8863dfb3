"""A followed run as answers of the API. Values in, values out. Texts of strangers become printable here."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import Final

from node.web import answers
from node.web.followed import Followed
from node.web.run_stats import here, peers_of
from protos.accounts import NOBODY, account_values, owner_values, owners_of
from protos.changes import Settings, with_settings
from protos.errors import Refusal
from protos.evaluation import Evaluation
from protos.identity import peer_id
from protos.limits import HASH_BYTES, SAMPLE_TEXT_BYTES_MAX
from protos.run_config import RunConfig
from protos.run_facts import failure_values, peer_values, phase_word, unconfirmed_words
from protos.text import printable
from protos.v1 import coordinator_pb2 as pb

ALLREDUCE_BYTES_PER_PARAMETER: Final = 8
"""A ring sends each fp32 twice: once to reduce, once to gather."""
PEERS_MAX: Final = 256
EVENTS_MAX: Final = 64
HELD_OUT_MAX: Final = 120
EXCLUSIONS_MAX: Final = 256
ABOUT_CHARACTERS_MAX: Final = 256
DEFAULT_MODEL: Final = "llama"
OWNERS_MAX: Final = 256
SAMPLE_LINES_MAX: Final = 64
SAMPLES_MAX: Final = 24
STEPS_OF_A_RUN_MAX: Final = 1 << 40
_ADMITS = ("open",)


def name_of(run: Followed) -> str:
    """The run's name for people: from the genesis, or from the link until the coordinator has answered."""
    return printable(run.config.name if run.config is not None else run.invite.run_name, 64)


def line_of(run: Followed) -> answers.RunLine:
    """The run in the list."""
    facts = run.facts
    return answers.RunLine(
        run=run.run_hex,
        name=name_of(run),
        phase="unknown" if facts is None else phase_word(facts),
        reason="" if facts is None else printable(facts.reason),
        step=run.book.head,
        steps=_steps_of(run),
        loss=run.book.loss,
        peers=0 if facts is None else len(here(facts)),
        problem=run.problem,
    )


def _steps_of(run: Followed) -> int:
    """As the run's settings say now, or the step at which its operator ended it."""
    planned = 0 if run.config is None else run.config.clock.steps
    return min(planned if run.facts is None else run.facts.total_steps, STEPS_OF_A_RUN_MAX)


def run_of(run: Followed) -> answers.Run:
    """Everything about the run but the columns of the charts and the ledger."""
    facts, book = run.facts or pb.GetRunResponse(), run.book
    speed = None if phase_word(facts) == "finished" else book.speed(run.looked or 0.0)
    parameters = facts.parameters or facts.genesis.parameters or None
    left = None
    if speed is not None and speed[0] > 0 and phase_word(facts) == "open":
        left = max(_steps_of(run) - book.head, 0) / speed[0]
    fork = facts.genesis.start.run_id.hex() if facts.genesis.HasField("start") else None
    return answers.Run(
        **line_of(run).model_dump(exclude={"peers"}),
        head=facts.head_hash.hex() if len(facts.head_hash) == HASH_BYTES else "",
        tokens=book.tokens,
        votes=book.votes,
        payload_bytes=book.payload_bytes,
        log_bytes=run.spool.total_bytes,
        parameters=parameters,
        payload_bytes_each=book.payload_bytes / book.votes if book.votes else None,
        allreduce_bytes_each=None if parameters is None else ALLREDUCE_BYTES_PER_PARAMETER * parameters,
        steps_per_minute=None if speed is None else 60 * speed[0],
        tokens_per_second=None if speed is None else speed[1],
        seconds_left=left,
        anchored=facts.anchored,
        unconfirmed_steps=facts.unconfirmed_steps,
        unconfirmed=unconfirmed_words(facts.unconfirmed_steps, anchored=facts.anchored),
        admission="" if run.config is None else run.config.admission.mode,
        snapshot_step=facts.snapshot.step if facts.HasField("snapshot") else None,
        fork_of=fork,
        about=None if run.config is None else about(run.config, run.book.settings),
        peers=peers(run, facts),
        peers_connected=len(here(facts)),
        peers_known=len(facts.peers),
        in_line=facts.in_line,
        written=written(run),
        events=list(book.events)[-EVENTS_MAX:],
        failures=[answers.Failure(**row) for row in failure_values(facts.failures)],
        held_out=[answers.HeldOut(**it.values()) for it in book.held_out(HELD_OUT_MAX)],
        looked=run.looked,
    )


def about(config: RunConfig, settings: Settings) -> answers.About:
    """What is trained. `settings`: those that the operator changed, as the newest entry has them."""
    with suppress(Refusal):
        config = with_settings(config, settings)
    model, data, optimizer = config.model, config.data, config.optimizer
    kind = model.factory or (model.config or {}).get("model_type", DEFAULT_MODEL)
    base = "" if optimizer.base.name == "sign" else f", base {optimizer.base.name}"
    base += " by chunks" if optimizer.base.block else ""
    return answers.About(
        model=printable(str(kind), ABOUT_CHARACTERS_MAX),
        data=[printable(source, ABOUT_CHARACTERS_MAX) for source, _, _ in data.sources()],
        tokenizer=printable(data.tokenizer, ABOUT_CHARACTERS_MAX),
        context=data.context,
        batch_samples=config.clock.batch_samples,
        optimizer=f"{optimizer.method}, {optimizer.selection}{base}",
        schedule=optimizer.schedule,
        lr=optimizer.lr,
    )


def peers(run: Followed, facts: pb.GetRunResponse) -> list[answers.Peer]:
    """The peers, the connected ones first, as the coordinator sorts them."""
    shares, accounts = run.book.shares(), run.book.accounts.by_key
    shown = peers_of(facts, PEERS_MAX)
    owners = owners_of(shown)
    return [
        answers.Peer(
            **peer_values(peer, owners.get(peer.public_key, NOBODY)),
            share=shares.get(peer.public_key, 0.0),
            last_step=accounts[peer.public_key].last_step if peer.public_key in accounts else 0,
            seen=run.seen.get(peer.public_key),
        )
        for peer in shown
    ]


def written(run: Followed) -> answers.Written | None:
    """The newest sample of the model's text."""
    return next(map(_written, run.book.written()), None)


def samples_of(run: Followed) -> answers.Samples:
    """The samples of all evaluated states, oldest first; of many, every n-th, and always the newest."""
    found = list(run.book.written())
    width = max(-(-len(found) // SAMPLES_MAX), 1)
    return answers.Samples(samples=[_written(it) for it in found[::width][::-1]])


def _written(found: Evaluation) -> answers.Written:
    """A sample with its line breaks, and nothing else that does not print."""
    text = "\n".join(printable(line, SAMPLE_TEXT_BYTES_MAX) for line in found.sample.splitlines()[:SAMPLE_LINES_MAX])
    return answers.Written(step=found.step, peer=peer_id(found.author), text=text)


def events_of(run: Followed, after: int) -> list[answers.Happened]:
    """The events of the feed with a larger number than `after`."""
    return [it for it in run.book.events if it.number > after]


def ledger_of(run: Followed, offset: int, limit: int) -> answers.Ledger:
    """A page of the leaderboard."""
    accounts = run.book.ordered()
    owners = owners_of(peers_of(run.facts, len(run.facts.peers))) if run.facts is not None else {}
    by_id = {peer_id(key): owner for key, owner in owners.items()}
    return answers.Ledger(
        to_step=run.book.head,
        identities=[
            answers.LedgerLine(**account_values(account, by_id.get(account.id, NOBODY)))
            for account in accounts[offset : offset + limit]
        ],
        total=len(accounts),
        offset=offset,
        owners=[answers.OwnerLine(**row) for row in owner_values(owners, accounts)[:OWNERS_MAX]],
        exclusions=[
            answers.ExcludedLine(**asdict(one) | {"reason": printable(one.reason)})
            for one in run.book.accounts.exclusions[-EXCLUSIONS_MAX:]
        ],
    )


def invite_of(run: Followed) -> answers.InviteLink:
    """The link, and whether it admits."""
    mode = "" if run.config is None else run.config.admission.mode
    return answers.InviteLink(invite=run.invite.link(), admits=mode in _ADMITS)
