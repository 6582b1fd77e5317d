"""`sessions`: conversations that are kept here, and going on with them, by another backend too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from backplane.cli import streams
from backplane.cli.parser import Options, Parser, add_config, add_json

if TYPE_CHECKING:
    from pathlib import Path

    from backplane.contract.conversation import SessionFile, UserMessage
    from backplane.errors import BackplaneError

ID_CHARS: Final = 8
"""Of a session's id in a list; any beginning that only one has names it."""

WORDS_CHARS_MAX: Final = 60
"""Of a session's first words in a list."""

GO_ON: Final = "Go on with the work where it was left."
"""Said to the successor where nothing else is."""

EXAMPLE = """
backplane sessions list
backplane sessions resume last "and now the tests"
backplane sessions handover last --to mine
"""

_ID: Final = "session id or its beginning, or `last`"

_EXPORT: Final = """
backplane sessions export last session.json
backplane sessions export last --to VENDOR --into-store
"""
_IMPORT: Final = """
backplane sessions import session.json
backplane sessions import --from VENDOR last --backend mine
"""


def parser(name: str) -> Parser:
    """The options of `sessions` and its own commands."""
    made = Parser(f"backplane {name}", "Find conversations again, and go on with them.", EXAMPLE)
    made.set_defaults(call=_list, json=False)
    commands = made.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser)

    def add(what: str, about: str, example: str, call: Callable[[Options], int]) -> Parser:
        part: Parser = commands.add_parser(what, help=about, about=f"{about.capitalize()}.", example=example)
        part.set_defaults(call=call)
        return part

    part = add("list", "list sessions, the last used first", "backplane sessions list", _list)
    add_json(part, "one JSON object a session and line", "session")
    part = add("show", "show what was said in a session", "backplane sessions show last", _show)
    part.add_argument("id", metavar="ID", nargs="?", default="last", help=f"{_ID} (last)")
    add_json(part, "the session as one JSON object", "session")
    part = add("resume", "go on with a session", 'backplane sessions resume last "go on"', _resume)
    part.add_argument("id", metavar="ID", help=_ID)
    part.add_argument("words", metavar="WORDS", nargs="?", help="what to say: one turn; without it, as `chat --resume`")
    part.add_argument("--image", metavar="FILE", action="append", default=[], help="a picture, shown with the words")
    _add_turn(part)
    part = add("fork", "copy a session, and print the copy's id", "backplane sessions fork last --at 4", _fork)
    part.add_argument("id", metavar="ID", help=_ID)
    part.add_argument("--at", type=int, metavar="N", help="only its first N messages")
    add_config(part)
    part = add("export", "write a session's file", _EXPORT, _export)
    part.add_argument("id", metavar="ID", help=_ID)
    part.add_argument("file", metavar="FILE", nargs="?", default="-", help="a new file; - for stdout (-)")
    part.add_argument("--to", metavar="VENDOR", help="in the form that this one's program goes on with")
    part.add_argument("--into-store", action="store_true", help="put it where that program looks for it; print its id")
    part.belong_to("--to", "--into-store")
    part = add("import", "take a session in, and print its new id", _IMPORT, _import)
    part.add_argument("file", metavar="FILE", help="a file that `export` wrote; with --from a path, an id, or `last`")
    part.add_argument("--from", dest="vendor", metavar="VENDOR", help="one that its program kept")
    part.add_argument("--backend", metavar="NAME", help="go on with this one (the file's; the vendor's)")
    add_config(part)
    part = add("handover", "go on with another backend", "backplane sessions handover last --to mine", _handover)
    part.add_argument("id", metavar="ID", help=_ID)
    part.add_argument("words", metavar="WORDS", nargs="?", default=GO_ON, help=f"what to say ({GO_ON})")
    part.add_argument("--to", metavar="NAME", required=True, help="the backend that goes on")
    part.add_argument("--model", metavar="M", help="its model (its own choice)")
    _add_turn(part)
    return made


def _add_turn(part: Parser) -> None:
    part.add_argument("--on-ask", choices=("deny", "allow", "prompt"), help="its questions; deny without a terminal")
    part.add_argument("--policy", metavar="FILE", help="one that tightens the session's: JSON, or a shipped one's name")
    add_config(part)


def _home() -> Path:
    import os

    from backplane import config

    return config.home_path(os.environ)


def _file(name: str) -> SessionFile:
    from backplane.providers import store

    home = _home()
    return store.read(store.path_of(home, store.find(home, name)))


# Looking --------------------------------------------------------------------------------------------------------------


def _list(options: Options) -> int:
    from backplane.contract import canonical
    from backplane.providers import store

    home = _home()
    files = _readable(store.listed(home))
    if options.json:
        for file in files:
            streams.write_json(canonical.encode(file) + b"\n")
    else:
        streams.write_lines((_row(home, file) for file in files), "no sessions")
    return 0


def _readable(files: Iterable[SessionFile | BackplaneError]) -> Iterator[SessionFile]:
    """Yield those that could be read, and say on stderr what is wrong with the others."""
    from backplane.errors import BackplaneError

    for file in files:
        if isinstance(file, BackplaneError):
            streams.error(file)
        else:
            yield file


def _row(home: Path, file: SessionFile) -> str:
    from backplane.providers import store

    state = "open" if store.is_open(home, file.id) else f"{len(file.turns)} turns"
    said = streams.one_line(_first_words(file), WORDS_CHARS_MAX)
    return f"{file.id[:ID_CHARS]}  {state:<9}  {file.provider:<12}  {said}"


def _first_words(file: SessionFile) -> str:
    from backplane.contract.conversation import UserMessage

    said = (message for turn in file.turns for message in turn.messages if isinstance(message, UserMessage))
    first = next(said, None)
    return first.content if first is not None else "(nothing was said)"


def _show(options: Options) -> int:
    from backplane.contract import canonical
    from backplane.contract.conversation import unresolved

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
    from backplane.contract.conversation import AgentMessage, UserMessage
    from backplane.providers.reading import text_of

    if isinstance(message, UserMessage):
        shown = [f"> (a picture: {image.media_type or image.url})" for image in message.images]
        return [*(f"> {line}" for line in message.content.splitlines()), *shown]
    if isinstance(message, AgentMessage):
        calls = [f"tool: {call.name} {text_of(call.arguments)[:400]}" for call in message.tool_calls]
        return [*message.content.splitlines(), *calls]
    mark = "tool failed" if message.is_error else "result"
    return [f"{mark}: {line}" for line in message.content.splitlines()[:12]]


def _export(options: Options) -> int:
    from pathlib import Path

    from backplane.contract import canonical
    from backplane.providers import exchange

    if options.to is not None:
        return _give_out(options)
    data = canonical.encode(_file(options.id)) + b"\n"
    if options.file == "-":
        streams.write_json(data)
    else:
        exchange.put(data, Path(options.file))
    return 0


def _give_out(options: Options) -> int:
    import os
    from pathlib import Path

    from backplane.errors import ConfigError
    from backplane.providers import exchange

    if options.into_store and options.file != "-":
        raise ConfigError("config_invalid", "both FILE and --into-store", hint="leave one out")
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


def _fork(options: Options) -> int:
    async def fork(registry: Any) -> int:
        from backplane.providers import store

        id = store.find(registry.plane.home, options.id)
        file = store.read(store.path_of(registry.plane.home, id))
        async with await registry.get(file.provider).fork_session(id, at=options.at) as session:
            await session.save()
            streams.write(f"{session.id}\n")
        return 0

    return _with_registry(options, fork)


def _import(options: Options) -> int:
    async def load(registry: Any) -> int:
        async with await _taken(registry, options) as session:
            await session.save()
            streams.write(f"{session.id}\n")
            _say_losses(session.losses)
        return 0

    return _with_registry(options, load)


async def _taken(registry: Any, options: Options) -> Any:
    from pathlib import Path

    from backplane.providers import store

    if options.vendor is not None:
        provider = registry.get(options.backend or options.vendor)
        return await provider.import_session(options.vendor, options.file)
    file = store.read(Path(options.file))
    return await registry.get(options.backend or file.provider).load(options.file)


def _resume(options: Options) -> int:
    if options.words is None:
        from backplane.cli import chat

        return chat.resume(options)

    async def resume(registry: Any) -> int:
        from backplane.cli import order
        from backplane.contract.conversation import UserMessage
        from backplane.providers import store

        id = store.find(registry.plane.home, options.id)
        file = store.read(store.path_of(registry.plane.home, id))
        provider = registry.get(file.provider)
        said = UserMessage(content=options.words, images=order.images(options.image))
        return await _turn(await provider.resume(id, _config(options)), said)

    return _with_registry(options, resume)


def _handover(options: Options) -> int:
    async def hand_over(registry: Any) -> int:
        from backplane.providers import store

        id = store.find(registry.plane.home, options.id)
        session = await registry.get(options.to).resume(id, _config(options, options.model))
        return await _turn(session, options.words)

    return _with_registry(options, hand_over)


def _config(options: Options, model: str | None = None) -> Any:
    import os

    from backplane.cli import asking
    from backplane.providers import SessionConfig

    how = options.on_ask or ("prompt" if streams.is_interactive() else "deny")
    return SessionConfig(model=model, policy=options.policy, on_ask=asking.callback(how, lambda: "", dict(os.environ)))


async def _turn(session: Any, words: str | UserMessage) -> int:
    """Say one thing, and show what comes; 1 where the turn failed."""
    from backplane.cli.talk import Teller

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
    import os
    from pathlib import Path

    import anyio

    from backplane import config
    from backplane.providers import ProviderRegistry

    environ = dict(os.environ)
    settings = config.load(Path(options.config) if options.config else None, environ, streams.folder(), {})

    async def main() -> int:
        async with ProviderRegistry(settings, config.home(environ), environ) as registry:
            code: int = await work(registry)
            return code

    return anyio.run(main)
