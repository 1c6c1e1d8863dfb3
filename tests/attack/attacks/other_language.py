"""Hostile requests from a client that shares no code with us: Node's `@grpc/grpc-js`, from the .proto files alone."""

import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.attack.base import Attack, Target

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("@grpc/grpc-js@1", "@grpc/proto-loader@0")
INSTALL_SECONDS_MAX = 120.0
MAY_ANSWER = ("ListEntries far: OK",)  # an empty page


@dataclass(frozen=True)
class OtherLanguage:
    name: str = "other_language"
    what: str = "a Node client sends envelopes, pages and operator's calls that are not in order"

    def run(self, target: Target, seconds: float) -> str:
        """Ask as long as there is time; AssertionError if anything was taken."""
        if shutil.which("npm") is None or shutil.which("node") is None:
            return "left out: npm is not installed"
        with tempfile.TemporaryDirectory(prefix="swarmentum-node-") as folder:
            install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *PACKAGES]
            done = subprocess.run(install, cwd=folder, timeout=INSTALL_SECONDS_MAX, capture_output=True, check=False)
            if done.returncode:
                return "left out: npm could not install @grpc/grpc-js"
            shutil.copy(ROOT / "tests" / "attack" / "stranger.js", folder)
            arguments = [target.invite.coordinators[0], str(ROOT), target.invite.run_id.hex(), str(seconds)]
            said = subprocess.run(
                ["node", "stranger.js", *arguments],
                cwd=folder,
                timeout=seconds + 60,
                capture_output=True,
                text=True,
                check=True,
            )
        answers: dict[str, int] = json.loads(said.stdout)
        taken = [what for what in answers if what.endswith(": OK") and what not in MAY_ANSWER]
        assert not taken, f"taken: {taken}"
        return f"{sum(answers.values())} requests: " + ", ".join(sorted({what.rpartition(": ")[2] for what in answers}))


ATTACK: Attack = OtherLanguage()
