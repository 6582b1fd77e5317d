"""An order whose agent was cut off after a side effect, as it goes on with another one: what was done is carried along.

The same way on as a session's `handover`: the folder as it was left, and what was said and done as history where the
next host heeds that, else as a record in words. A call without a recorded result is asked about, never repeated.
"""

from __future__ import annotations

from typing import Final

import msgspec

from backplane.contract.conversation import SessionTurn, UserMessage
from backplane.contract.work import WorkOrder
from backplane.errors import BackendError, ConfigError
from backplane.providers.orders import SessionConfig, Wanted, abilities, compose
from backplane.providers.reading import Transcript
from backplane.runtime.hello import ask_hello
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run

GO_ON: Final = (
    "The agent that had this task was cut off in the middle. The folder is as it left it. Go on from there: look at "
    "what is done, do what is missing, and repeat nothing that was done. The task was:\n{task}"
)


AGAIN: Final = "Go on."
"""What a later agent was told, without the record that it was told, too."""


def check_place(order: WorkOrder) -> None:
    """Refuse an order whose next agent would not find what the one before has done.

    Raises:
        ConfigError: `config_invalid`.
    """
    if order.workspace.mode == "staged" and order.lane != "workspace_first":
        fact = "after_effect is hand_over, and what the first agent did would stay in a copy of its own"
        raise ConfigError("config_invalid", fact, hint="the lane workspace_first, or the mode pass_through")


async def hand_over(plane: ControlPlane, order: WorkOrder, ended: tuple[Run, ...], backend: str) -> WorkOrder:
    """Put what a run did where the next one finds it, and return the order for that.

    Args:
        order: as it was given at first.
        ended: the runs that had a side effect, oldest first; the newest one's result is put into the folder.
        backend: the next one.

    Raises:
        PolicyError: `policy_denied`, what the run did is not what its policy allows.
        WorkspaceError: `execution_workspace_error`, the folder has changed meanwhile.
        BackendError: `capability_unsupported`, the next host reads nothing but a command; or it did not say hello.
        ProtocolError: `protocol_handshake_failed`.
    """
    host = plane.find_backend(backend)
    can = abilities(await ask_hello(host, plane.environ, host.limits or plane.settings.limits))
    if not can.reads:
        fact = f"{backend!r} does what the task says and reads nothing else: it cannot be told what was done"
        raise BackendError("capability_unsupported", fact)
    if order.workspace.mode == "staged":
        await plane.apply(ended[-1].id)
    composed = compose(
        Wanted(
            config=SessionConfig(model=order.config.model, mode=order.workspace.mode, lane=order.lane),
            words=GO_ON.format(task=order.task),
            can=msgspec.structs.replace(can, extensions=frozenset()),  # No conversation of the host's own is begun.
            provider=backend,
            turns=tuple(_turn(run, order.task if run is ended[0] else AGAIN) for run in ended),
            root=order.workspace.root,
            policy=order.policy,
            fresh=True,
        )
    ).order
    told = msgspec.structs.replace(order, task=composed.task)
    own, said = order.abp("history"), composed.abp("history")
    return told if said is None else told.with_abp("history", [*(own if isinstance(own, list | tuple) else ()), *said])


def _turn(run: Run, words: str) -> SessionTurn:
    transcript = Transcript()
    for event in run.receipt.trace:
        transcript.take(event)
    said = (UserMessage(content=words), *transcript.messages())
    return SessionTurn(run_id=run.id, provider=run.backend_id, model=run.order.config.model, messages=said)
