"""`sessions`: conversations that are kept here, and going on with them, by another backend too."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio

from backplane import config
from backplane.cli import asking, order, streams
from backplane.cli.parser import Options
from backplane.cli.start import load_settings, wrong_words
from backplane.cli.talk import Teller
from backplane.contract import canonical
from backplane.contract.conversation import AgentMessage, SessionFile, UserMessage, unresolved
from backplane.errors import BackplaneError
from backplane.providers import ProviderRegistry, SessionConfig, exchange, store
from backplane.providers.reading import text_of

ID_CHARS: Final = 8
"""Of a session's id in a list; any beginning that only one has names it."""

WORDS_CHARS_MAX: Final = 60
"""Of a session's first words in a list."""


def _file(name: str) -> SessionFile:
    home = config.home_path(os.environ)
    return store.read(store.path_of(home, store.find(home, name)))


# Looking --------------------------------------------------------------------------------------------------------------


def list_sessions(options: Options) -> int:
    home = config.home_path(os.environ)
    files = _readable(store.listed(home))
    if options.json:
        for file in files:
            streams.write_json(canonical.encode(file) + b"\n")
    else:
        streams.write_lines((_row(home, file) for file in files), "no sessions")
    return 0


def _readable(files: Iterable[SessionFile | BackplaneError]) -> Iterator[SessionFile]:
    """Yield those that could be read, and say on stderr what is wrong with the others."""
    for file in files:
        if isinstance(file, BackplaneError):
            streams.error(file)
        else:
            yield file


def _row(home: Path, file: SessionFile) -> str:
    state = "open" if store.is_open(home, file.id) else streams.count(len(file.turns), "turn")
    said = streams.one_line(_first_words(file), WORDS_CHARS_MAX)
    return f"{file.id[:ID_CHARS]}  {state:<9}  {file.provider:<12}  {said}"


def _first_words(file: SessionFile) -> str:
    said = (message for turn in file.turns for message in turn.messages if isinstance(message, UserMessage))
    first = next(said, None)
    return first.content if first is not None else "(nothing was said)"


def show_session(options: Options) -> int:
    file = _file(options.id)
    if options.json:
        streams.write_json(canonical.encode(file) + b"\n")
        return 0
    streams.write(f"session {file.id} with {file.provider}\n")
    for number, turn in enumerate(file.turns):
        if number == file.cleared and number:
            streams.write("— the history was cleared here —\n")
        run = f"run {turn.run_id[:ID_CHARS]}" if turn.run_id is not None else "no run here"
        streams.write(f"\nturn {number + 1}: {turn.provider}, {run}, {turn.stop_reason or '?'}\n")
        for message in turn.messages:
            streams.write("".join(f"  {streams.printable(line)}\n" for line in _lines(message)))
        for call in unresolved(turn.messages):
            streams.write(f"  no result was recorded of {streams.one_line(call.name)} ({streams.one_line(call.id)})\n")
    for loss in file.losses:
        streams.write(f"not carried: {streams.one_line(loss)}\n")
    return 0


def _lines(message: Any) -> list[str]:
    if isinstance(message, UserMessage):
        shown = [f"> (a picture: {image.media_type or image.url})" for image in message.images]
        return [*(f"> {line}" for line in message.content.splitlines()), *shown]
    if isinstance(message, AgentMessage):
        calls = [f"tool: {call.name} {text_of(call.arguments)[:400]}" for call in message.tool_calls]
        return [*message.content.splitlines(), *calls]
    mark = "tool failed" if message.is_error else "result"
    return [f"{mark}: {line}" for line in message.content.splitlines()[:12]]


def export_session(options: Options) -> int:
    if options.to is not None:
        return _give_out(options)
    data = canonical.encode(_file(options.id)) + b"\n"
    if options.file == "-":
        streams.write_json(data)
    else:
        exchange.put(data, Path(options.file))
    return 0


def _give_out(options: Options) -> int:
    if options.into_store and options.file != "-":
        raise wrong_words("both FILE and --into-store", "leave one out")
    file = _file(options.id)
    written = exchange.give_out(file, options.to, os.environ, root=file.root or str(streams.folder()))
    if options.into_store:
        exchange.into_store(written)
        streams.write(f"{written.id}\n")
    elif options.file == "-":
        streams.write_json(written.data)
    else:
        exchange.put(written.data, Path(options.file))
        if written.takes_in is not None:
            streams.complain(f"{written.takes_in} takes it in, as {written.id}\n")
    _say_losses(written.losses)
    return 0


# Going on -------------------------------------------------------------------------------------------------------------


def fork(options: Options) -> int:
    async def fork(registry: Any) -> int:
        id = store.find(registry.plane.home, options.id)
        file = store.read(store.path_of(registry.plane.home, id))
        async with await registry.get(file.provider).fork_session(id, at=options.at) as session:
            await session.save()
            streams.write(f"{session.id}\n")
        return 0

    return _with_registry(options, fork)


def import_session(options: Options) -> int:
    async def load(registry: Any) -> int:
        async with await _taken(registry, options) as session:
            await session.save()
            streams.write(f"{session.id}\n")
            _say_losses(session.losses)
        return 0

    return _with_registry(options, load)


async def _taken(registry: Any, options: Options) -> Any:
    if options.vendor is not None:
        provider = registry.get(options.backend or options.vendor)
        return await provider.import_session(options.vendor, options.file)
    file = store.read(Path(options.file))
    return await registry.get(options.backend or file.provider).load(options.file)


def resume(options: Options) -> int:
    if options.words is None:
        from backplane.cli import chat

        return chat.resume(options)

    async def resume(registry: Any) -> int:
        id = store.find(registry.plane.home, options.id)
        file = store.read(store.path_of(registry.plane.home, id))
        provider = registry.get(file.provider)
        said = UserMessage(content=options.words, images=order.images(options.image))
        return await _turn(await provider.resume(id, _config(options)), said)

    return _with_registry(options, resume)


def hand_over(options: Options) -> int:
    async def hand_over(registry: Any) -> int:
        id = store.find(registry.plane.home, options.id)
        session = await registry.get(options.to).resume(id, _config(options, options.model))
        return await _turn(session, options.words)

    return _with_registry(options, hand_over)


def _config(options: Options, model: str | None = None) -> Any:
    how = options.on_ask or ("prompt" if streams.is_interactive() else "deny")
    return SessionConfig(model=model, policy=options.policy, on_ask=asking.callback(how, lambda: "", dict(os.environ)))


async def _turn(session: Any, words: str | UserMessage) -> int:
    """Say one thing, and show what comes; 1 where the turn failed."""
    async with session:
        before, teller = session.losses, Teller(streams.write)
        async for event in session.send_message(words):
            teller.tell(event)
        _say_losses(tuple(loss for loss in session.losses if loss not in before) or before)
        return 0 if teller.stop_reason not in ("error", None) else 1


def _say_losses(losses: tuple[str, ...]) -> None:
    for loss in losses:
        streams.complain(f"not carried: {streams.one_line(loss)}\n")


def _with_registry(options: Options, work: Callable[[Any], Any]) -> int:
    environ = dict(os.environ)
    settings = load_settings(options)

    async def main() -> int:
        async with ProviderRegistry(settings, config.home(environ), environ) as registry:
            code: int = await work(registry)
            return code

    return anyio.run(main)
