"""A client process of the soak: some clients, each with connections of its own.

Prints its counts as one line of JSON when its time is over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import grpc
import uvloop
from soak_actions import Actions
from soak_talk import TRANSPORTS, Answer, Talk

from kvcm.protocol import meta_service_pb2 as pb

_PAUSE_SECONDS = 0.5  # between two actions, on average
_RECONNECT = 0.01  # of the actions
_DEADLINE_SECONDS = 30.0
_MOST_FAILURES = 50


@dataclass(slots=True)
class Done:
    """The counts of a process's clients.

    Attributes:
        answers: by call, transport and code.
        failures: errors, in words; the first ones.
        failed: how many.
        seconds: that answers took, by transport.
    """

    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    failed: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in TRANSPORTS})

    def note(self, failure: str) -> None:
        """Note something that went wrong."""
        self.failed += 1
        if len(self.failures) < _MOST_FAILURES:
            self.failures.append(failure[:500])


class Client:
    """One client: its actions follow one another."""

    def __init__(self, number: int, ports: dict[str, dict[str, int]], done: Done) -> None:
        self._transport = TRANSPORTS[number % len(TRANSPORTS)]
        self._random, self._done = Random(number), done
        self._data = Talk(self._transport, ports["data"][self._transport])
        self._admin = Talk(self._transport, ports["admin"][self._transport])
        self._actions = Actions(number, self._random, self._asker(self._data), self._asker(self._admin))

    def _asker(self, talk: Talk) -> Any:
        async def ask(request: Any, expected: frozenset[int]) -> Answer | None:
            begin = time.perf_counter()
            try:
                answer = await asyncio.wait_for(talk.ask(request), _DEADLINE_SECONDS)
            except (grpc.RpcError, OSError, AssertionError, EOFError, TimeoutError) as error:
                self._done.note(f"{type(request).__name__} over {self._transport}: {error!r}")
                await talk.close()
                return None
            self._done.seconds[self._transport].append(time.perf_counter() - begin)
            self._done.answers[f"{answer.call}:{self._transport}:{pb.ErrorCode.Name(answer.code)}"] += 1
            if answer.code not in expected:
                self._done.note(f"{answer.call} over {self._transport}: code {answer.code}, {answer.text}")
                return None
            return answer if answer.code == pb.OK else None

        return ask

    async def run(self, end: float) -> None:
        """Work until that moment of the monotonic clock."""
        await asyncio.sleep(self._random.uniform(0, _PAUSE_SECONDS))
        while time.monotonic() < end:
            await self._actions.next()
            if self._random.random() < _RECONNECT:
                await self._data.close()
            await asyncio.sleep(self._random.expovariate(1 / _PAUSE_SECONDS))
        await self._data.close()
        await self._admin.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=json.loads, help="first, clients, seconds, ports")
    job = parser.parse_args().job
    done, end = Done(), time.monotonic() + job["seconds"]
    clients = [Client(number, job["ports"], done) for number in range(job["first"], job["first"] + job["clients"])]
    await asyncio.gather(*(client.run(end) for client in clients))
    seconds = {name: [round(each, 5) for each in times] for name, times in done.seconds.items()}
    reported = {"answers": done.answers, "failures": done.failures, "failed": done.failed, "seconds": seconds}
    print(json.dumps(reported), flush=True)


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
