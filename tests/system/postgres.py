"""A real PostgreSQL server for tests: a temporary data folder, a free port, gone at the end. Debian's `postgresql`."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import free_port

READY_SECONDS_MAX = 300.0


class NoPostgresError(Exception):
    """This machine cannot start a server; the text says why."""


def server_or_skip() -> Iterator[Postgres]:
    """What a fixture yields: a server, or the test is skipped with the reason."""
    try:
        made = Postgres()
    except NoPostgresError as error:
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()


class Postgres:
    """Serves until `close`. fsync stays on. `inside` is put before the server's command (a network namespace)."""

    def __init__(self, host: str = "127.0.0.1", inside: tuple[str, ...] = ()) -> None:
        binaries = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
        if not binaries:
            raise NoPostgresError("no PostgreSQL server here (apt-get install postgresql)")
        # Not below pytest's folder: each pytest that starts closes that folder to other users, such as `postgres`.
        self._bin, self._folder = binaries[-1], Path(tempfile.mkdtemp(prefix="swarmentum-pg-"))
        self.host, self.port = host, free_port() if host == "127.0.0.1" else 5432
        self._as = self._somebody_else()
        data = self._folder / "data"
        self._run("initdb", "-D", str(data), "--auth=trust", "--username=swarm", "--encoding=UTF8")
        with (data / "pg_hba.conf").open("a") as file:
            file.write("host all all 0.0.0.0/0 trust\n")
        self._log = (self._folder / "log").open("w")
        listen = ("-c", f"listen_addresses={host}", "-p", str(self.port), "-k", str(self._folder))
        self.process = subprocess.Popen(
            [*inside, *self._as, str(self._bin / "postgres"), "-D", str(data), *listen],
            stdout=self._log, stderr=self._log, start_new_session=True, cwd=self._folder,
        )  # fmt: skip
        until = time.monotonic() + READY_SECONDS_MAX
        while subprocess.run(
            [*self._as, str(self._bin / "pg_isready"), "-h", str(self._folder), "-p", str(self.port)],
            capture_output=True, check=False,
        ).returncode:  # fmt: skip
            if self.process.poll() is not None or time.monotonic() > until:
                self.close()
                raise NoPostgresError((self._folder / "log").read_text()[-2000:])
            time.sleep(0.05)
        self._databases = 0

    def _somebody_else(self) -> tuple[str, ...]:
        """The server refuses to run as root: the user `postgres` does, who must get to the folder."""
        if os.geteuid() != 0:
            return ()
        try:
            user = pwd.getpwnam("postgres")
        except KeyError as error:
            raise NoPostgresError("root needs a user `postgres` to run the server as") from error
        if shutil.which("setpriv") is None:
            raise NoPostgresError("root needs setpriv (util-linux) to run the server as somebody else")
        os.chown(self._folder, user.pw_uid, user.pw_gid)
        return ("setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")

    def _run(self, name: str, *words: str) -> None:
        done = subprocess.run(
            [*self._as, str(self._bin / name), *words], capture_output=True, text=True, check=False, cwd=self._folder
        )
        if done.returncode:
            raise NoPostgresError(f"{name}: {done.stderr[-2000:]}")

    def database(self) -> str:
        """URL of a new, empty database."""
        self._databases += 1
        name = f"swarm{self._databases}"
        self._run("createdb", "-h", str(self._folder), "-p", str(self.port), "-U", "swarm", name)
        return f"postgresql+psycopg://swarm@{self.host}:{self.port}/{name}"

    def obey(self, *statements: str) -> None:
        """Do each statement as the superuser, in a session of its own."""
        for words in statements:
            self._run(
                "psql", "-h", str(self._folder), "-p", str(self.port), "-U", "swarm", "-d", "postgres", "-c", words
            )

    def over_socket(self, url: str) -> str:
        """The same database for this process, which may be outside the server's network."""
        return f"postgresql+psycopg://swarm@/{url.rpartition('/')[2]}?host={self._folder}&port={self.port}"

    @contextmanager
    def pooler(self, url: str) -> Iterator[str]:
        """The same database behind PgBouncer in transaction mode, with one session."""
        name, port = url.rpartition("/")[2], free_port()
        file = self._folder / "pgbouncer.ini"
        file.write_text(
            f"[databases]\n{name} = host={self.host} port={self.port} user=swarm pool_size=1\n[pgbouncer]\nauth_type = any\n"
            f"pool_mode = transaction\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
        )
        command = [*self._as, "pgbouncer", "-q", str(file)]
        with subprocess.Popen(command, stdout=self._log, stderr=self._log, cwd=self._folder) as process:
            try:
                until = time.monotonic() + READY_SECONDS_MAX
                while process.poll() is None and time.monotonic() < until:
                    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                        break
                    time.sleep(0.05)
                yield f"postgresql+psycopg://swarm@127.0.0.1:{port}/{name}"
            finally:
                process.terminate()

    def close(self) -> None:
        """Stop it (SIGQUIT: at once)."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
