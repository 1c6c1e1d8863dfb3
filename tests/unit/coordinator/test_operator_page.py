"""The actions of the operator's page at a real coordinator, over HTTP: each is the operator's command, and is logged."""

import asyncio
from pathlib import Path
from typing import Any

from coordinator.clock.state import Phase
from coordinator.commands.operator import Operator, facts_of
from coordinator.commands.signing import Operators
from coordinator.web import actions
from coordinator.web.actions import ALL
from protos.identity import peer_id
from protos.invite import Invite
from protos.run_config import RunConfig
from protos.run_sections import OperatorsConfig
from tests.unit.coordinator.serving import COORDINATOR, Served, eventually, identity, operated, peers, served
from tests.unit.web.test_operator_page import Site, site

TOML = 'name = "made here"\n[clock]\nsteps = 20\nmin_peers = 2\n'
WRONG = 'name = "wrong"\n[clock]\nsteps = -3\n\n[optimizer]\nlr = "fast"\nspeed = 9\n'
CODE = 'name = "code"\n[model]\nfactory = "os:mkdir"\nkwargs = { path = "FOLDER" }\n'


def config(**clock: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "page", "clock": {"steps": 9, "min_peers": 2, **clock}})


async def good(page: Site, what: str, run: str = "", **values: Any) -> Any:
    got = await page.ask(what, run, **values)
    assert got.status == 200, got.body
    return got.json


async def bad(page: Site, what: str, run: str = "", **values: Any) -> tuple[int, str]:
    got = await page.ask(what, run, **values)
    assert got.status >= 400, got.body
    return got.status, got.error


def run_of(here: Served) -> str:
    return here.invite.run_id.hex()


async def test_a_run_is_paused_changed_resumed_and_finished(tmp_path: Path) -> None:
    async with served(tmp_path, config()) as here, site(tmp_path, lambda: Operator(tmp_path)) as page:
        run = run_of(here)
        with operated(here):
            await page.login()
            [line] = (await good(page, "runs"))["runs"]
            assert (line["run"], line["steps"]) == (run, 9)
            status, why = await bad(page, "change", run, settings=["clock.steps=12"])
            assert (status, "pause" in why) == (409, True)
            await good(page, "pause", run, reason="<b>maintenance</b>")
            assert "<b>maintenance</b>" in (await good(page, "run", run))["reason"]
            said = (await good(page, "change", run, settings=["clock.steps=12", "optimizer.lr=0.001"]))["said"]
            assert "clock.steps = 12 from step 1 on" in said
            for settings in (["/etc/passwd"], ["data.source=x"], ["clock.steps=0"], ["clock.steps"]):
                assert (await bad(page, "change", run, settings=settings))[0] in (400, 409)
            facts = await good(page, "run", run)
            assert {row["key"]: row["value"] for row in facts["settings"]}["clock.steps"] == 12
            await good(page, "resume", run)
            assert (await good(page, "run", run))["steps"] == 12
            await good(page, "finish", run, reason="enough")
            assert (await good(page, "run", run))["phase"].startswith("finished")
            assert (await bad(page, "finish", run))[0] == 409
            assert (await bad(page, "pause"))[0] == 400, "no run"
            assert (await bad(page, "pause", "0" * 64))[0] == 400, "no such run"
            log = (await good(page, "log"))["actions"]
        done = [it["action"] for it in reversed(log) if it["outcome"] == "done"]
        assert done == ["login", "pause", "change", "resume", "finish"]
        assert {it["session"] for it in log} == {log[0]["session"]}
        assert all(it["run"] == run for it in log if it["action"] in ("change", "resume", "finish"))


async def test_a_peer_is_excluded_and_readmitted_and_invites_are_made_and_revoked(tmp_path: Path) -> None:
    invited = config().model_copy(
        update={"admission": RunConfig.model_validate({"admission": {"mode": "invite"}}).admission}
    )
    async with served(tmp_path, invited) as here, site(tmp_path, lambda: Operator(tmp_path)) as page:
        with operated(here):
            await page.login()
            run = run_of(here)
            made = await good(page, "invite", run, uses=2, expires="2h", label="for ada")
            link = made["copy"].removeprefix("swarmentum join ")
            assert Invite.parse(link).ticket
            here.invite = Invite.parse(link)
            async with peers(here, 1) as [peer]:
                await peer.join()
                await eventually(lambda: here.runtime.run.peers)
                facts = await good(page, "run", run)
                name = peer_id(peer.key)
                assert [it["id"] for it in facts["peers"]] == [name]
                assert [(it["label"], it["uses_left"], it["used_by"]) for it in facts["invites"]] == [
                    ("for ada", 1, [name])
                ]
                assert (await bad(page, "exclude", run, peer="nobody", reason="x"))[0] == 400
                await good(page, "exclude", run, peer=name[-8:], reason="sends noise")
                [row] = (await good(page, "run", run))["peers"]
                assert (row["standing"], "sends noise" in row["standing_reason"]) == ("excluded", True)
                await good(page, "readmit", run, peer=name)
                [row] = (await good(page, "run", run))["peers"]
                assert row["standing"] != "excluded"
            await good(page, "revoke", run, invite="for ada", and_its_peers=True)
            assert [it["state"] for it in (await good(page, "run", run))["invites"]] == ["revoked"]
            for values in ({"expires": "soon"}, {"uses": 0}, {"uses": 1 << 40}, {"label": "x" * 300}):
                assert (await bad(page, "invite", run, **values))[0] == 400
            log = (tmp_path / "actions.jsonl").read_text()
        assert link not in log
        assert '"label": "for ada"' in log


async def test_a_run_is_created_from_its_text_after_every_mistake_was_named_with_its_line(tmp_path: Path) -> None:
    async with served(tmp_path, config()) as here, site(tmp_path, lambda: Operator(tmp_path)) as page:
        with operated(here):
            await page.login()
            for what in ("check", "create"):
                status, why = await bad(page, what, text=WRONG, layout=False)
                lines = why.splitlines()
                assert status == 400
                named = [line.split(":")[1:3] for line in sorted(lines)]
                assert named == [["3", " clock.steps"], ["6", " optimizer.lr"], ["7", " optimizer.speed"]]
                assert all(line.startswith("run.toml:") for line in lines)
            assert (await bad(page, "create", text="name = ["))[1].startswith("run.toml:1: is not TOML")
            assert "already" in (await bad(page, "create", text='name = "page"', layout=False))[1]
            checked = await good(page, "check", text=TOML, layout=False)
            assert dict(checked["rows"])["steps, tokens"].startswith("20, ")
            assert len(here.hub.runs) == 1
            made = await good(page, "create", text=TOML, layout=False, anchor=True)
            assert len(here.hub.runs) == 2
            assert made["secret"].startswith("swarmentum anchor swarmentum-anchor://")
            assert (await good(page, "run", made["run"]))["name"] == "made here"
            log = (await good(page, "log"))["actions"]
            assert log[0]["values"] == {"characters": len(TOML), "anchor": True, "layout": False}
            assert made["secret"] not in (tmp_path / "actions.jsonl").read_text()


async def test_the_page_runs_no_code_that_a_run_names(tmp_path: Path) -> None:
    async with served(tmp_path, config()) as here, site(tmp_path, lambda: Operator(tmp_path)) as page:
        with operated(here):
            await page.login()
            text = CODE.replace("FOLDER", str(tmp_path / "made"))
            notes = (await good(page, "check", text=text, layout=True))["notes"]
            assert any("runs no code" in note for note in notes)
            await good(page, "create", text=text, layout=True)
            assert not (tmp_path / "made").exists()
            folder = f'name = "mine"\n[data]\ntokenizer = "{tmp_path}"\n'
            assert any("reads none" in note for note in (await good(page, "check", text=folder))["notes"])
            nested = "name = " + "[" * 30_000
            assert (await bad(page, "check", text=nested))[0] == 400
            with actions._BUILDING:
                assert "being built" in (await bad(page, "check", text=TOML))[1]


async def test_a_coordinator_that_does_not_answer_is_an_error_of_its_own(tmp_path: Path) -> None:
    async with site(tmp_path, lambda: Operator(tmp_path)) as page:
        await page.login()
        status, why = await bad(page, "runs")
        assert (status, "no coordinator serves" in why) == (400, True)


def test_the_page_can_do_what_is_listed_and_nothing_else() -> None:
    acts = {name for name, what in ALL.items() if what.acts}
    assert acts == {"create", "pause", "resume", "finish", "exclude", "readmit", "change", "invite", "revoke", "sign"}
    assert ALL.keys() - acts == {"runs", "run", "check"}


async def test_orders_of_several_operators_are_shown_and_signed_where_the_pages_key_is_one_of_them(
    tmp_path: Path,
) -> None:
    ada, bob = identity(40), identity(41)
    for name, keys, signs in (("in", (COORDINATOR, ada), True), ("out", (bob, ada), False)):
        home, named = tmp_path / name, OperatorsConfig(keys=[it.peer_id for it in keys], needed=2)
        home.mkdir()
        run_config = config().model_copy(update={"operators": named})
        async with served(home, run_config) as here, site(home, lambda home=home: Operator(home)) as page:  # type: ignore[misc]
            run = run_of(here)
            with operated(here):
                await page.login()
                facts = await good(page, "run", run)
                assert (facts["operators"], facts["needed"], facts["signs"], facts["orders"]) == (2, 2, signs, [])
                given = await asyncio.to_thread(
                    lambda: Operators(here.invite, facts_of(here.invite), ada).give(finishes=True, reason="enough")
                )
                [row] = (await good(page, "run", run))["orders"]
                assert (row["says"], row["signed_by"]) == ("finish the run: enough", [ada.peer_id])
                if signs:
                    waits = (await good(page, "exclude", run, peer=ada.peer_id, reason="noise"))["said"]
                    assert "it needs 2 operators" in waits
                    said = (await good(page, "sign", run, order=given.name.hex()[:12]))["said"]
                    assert "is obeyed" in said
                    assert here.runtime.run.phase is Phase.FINISHED
                else:
                    for what, values in (("sign", {"order": row["order"]}), ("finish", {"reason": ""})):
                        status, why = await bad(page, what, run, **values)
                        assert (status, "is none of this run's operators" in why) == (400, True)
                    assert here.runtime.run.phase is not Phase.FINISHED
