"""`chat`: a conversation in the terminal. Ctrl-C stops the turn and not the session; `/help` lists the commands.

Where there is no terminal each line of the input is one turn, and approvals are denied.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from backplane.cli import asking, order, streams
from backplane.cli import options as add
from backplane.cli.command import Args, Parser, wrong
from backplane.cli.sessions import print_losses, with_registry
from backplane.cli.sessions.show import message_lines
from backplane.cli.talk import Teller
from backplane.contract.approval import Decision
from backplane.contract.conversation import Image, UserMessage
from backplane.errors import BackplaneError
from backplane.process.pipes import Pair
from backplane.protocol import Lines, Overlong
from backplane.providers import ProviderRegistry, Session, SessionConfig, store

if TYPE_CHECKING:
    from backplane.cli.keys import Key, KeyTerminal
    from backplane.contract.events import Approval


PROMPT: Final = "> "
NOTHING_KEPT: Final = "nothing was said, so no session is kept\n"


def resume(args: Args) -> int:
    """Go on with a session as `sessions resume ID` says it."""
    given = dict.fromkeys(("backend", "model", "system", "root", "in_place", "max_turns"))
    for name, value in {**given, "resume": args.id, "image": args.image}.items():
        setattr(args, name, value)
    return run(args)


HELP = "Hold a conversation in the terminal."
EXAMPLE = "backplane chat --backend mine\nbackplane chat --continue"


def options(p: Parser) -> None:
    add.value(p, "-b", "--backend", metavar="NAME", help="talk to this backend (see `backplane backends`)")
    add.value(p, "--resume", metavar="ID", help="continue this session; `last` is the one used last")
    p.add_argument("-c", "--continue", dest="resume", action="store_const", const="last", help="as --resume last")
    add.model(p)
    add.many(p, "--image", metavar="FILE", help="show this picture with your first words")
    add.value(p, "--system", metavar="TEXT", help="instructions for the whole conversation")
    add.root(p)
    add.flag(p, "--in-place", help="work in the folder itself, not in a copy")
    add.value(
        p, "--policy", metavar="FILE", help="policy as JSON, or default, strict or ci; with --resume it only tightens"
    )
    add.value(p, "--max-turns", metavar="N", type=int, help="turns of the model in one turn of yours")
    p.add_argument(
        "--on-ask", choices=("deny", "allow", "prompt"),
        help="answer approvals so (default: prompt on a terminal, else deny)",
    )  # fmt: skip
    add.config(p)


def run(args: Args) -> int:
    images = order.images(args.image)

    async def chat(registry: ProviderRegistry) -> int:
        if not streams.is_interactive():
            return await _by_lines(registry, args, images)
        from backplane.cli.keys import KeyTerminal

        with KeyTerminal(streams.STDIN).opened() as terminal:
            return await _Chat(registry, args, terminal, images).hold()

    return with_registry(args, chat)


async def _open(
    registry: ProviderRegistry, args: Args, on_ask: Callable[[Approval], Awaitable[Decision]] | None
) -> Session:
    """Begin the session that the options ask for, or go on with it."""
    root = str(streams.folder() / args.root) if args.root else None
    given: dict[str, Any] = {"model": args.model, "system_prompt": args.system, "policy": args.policy}
    given |= {"max_turns": args.max_turns, "mode": "pass_through" if args.in_place else None, "on_ask": on_ask}
    if args.resume is None:
        return await registry.get(args.backend).create_session(
            SessionConfig(root=root or str(streams.folder()), **given)
        )
    id = store.find(registry.plane.home, args.resume)
    name = args.backend or store.read(store.path_of(registry.plane.home, id)).provider
    config: SessionConfig = SessionConfig(root=root, **given)
    return await registry.get(name).resume(id, config)


async def _by_lines(registry: ProviderRegistry, args: Args, images: tuple[Image, ...]) -> int:
    answer = asking.callback(args.on_ask if args.on_ask == "allow" else "deny", lambda: "", dict(os.environ))
    code = 0
    async with await _open(registry, args, answer) as session:
        async for line in _typed_lines():
            teller, before = Teller(streams.write), session.losses
            said, images = UserMessage(content=line, images=images), ()
            async for event in session.send_message(said):
                teller.tell(event)
            print_losses(tuple(loss for loss in session.losses if loss not in before))
            code = 1 if teller.stop_reason == "error" else code
        streams.complain(f"session {session.id}\n" if _is_kept(registry, session) else NOTHING_KEPT)
    return code


async def _typed_lines() -> AsyncIterator[str]:
    """The lines of stdin, each as soon as it is whole; empty ones are passed over.

    Raises:
        ConfigError: `config_invalid`, one is too long or no UTF-8.
    """
    ends, lines, number = Pair(-1, streams.STDIN), Lines(streams.INPUT_BYTES_MAX), 0
    data = b"more"
    while data:
        data = await ends.more()
        for line in lines.feed(data) if data else [lines.end()]:
            number += 1
            if isinstance(line, Overlong):
                raise wrong(f"line {number} of stdin is over {streams.INPUT_BYTES_MAX} bytes", "write less a line")
            try:
                text = line.decode().strip()
            except UnicodeDecodeError as error:
                raise wrong(f"line {number} of stdin is no UTF-8", "write it in UTF-8") from error
            if text:
                yield text


def _is_kept(registry: ProviderRegistry, session: Session) -> bool:
    """Whether there is a file of the session: it is written with the first turn."""
    return store.path_of(registry.plane.home, session.id).exists()


class _Chat:
    """A session on a terminal."""

    def __init__(
        self, registry: ProviderRegistry, args: Args, terminal: KeyTerminal, images: tuple[Image, ...]
    ) -> None:
        self._registry, self._options, self._terminal = registry, args, terminal
        self._session: Session
        self._images = images
        """Shown with the next words."""
        self._waiting: list[Key] = []
        """Lines that were typed while the agent worked."""
        self._asking: Any = None
        """Where the key goes that answers an approval; None while nothing is asked."""
        self._code: int | None = None

    async def hold(self) -> int:
        """Talk until Ctrl-D or `/quit`; return the exit code."""
        async with await _open(self._registry, self._options, self._on_ask) as self._session:
            session = self._session
            self._say(f"{session.provider}{f', {session.model}' if session.model else ''}; /help, Ctrl-D ends\n")
            while self._code is None:
                key = await self._next()
                if key.kind == "end":
                    self._say("\n")
                    break
                if key.kind == "line" and key.text.strip():
                    await self._do(key)
            kept = _is_kept(self._registry, session)
            self._say(f"backplane chat --resume {session.id[:8]}\n" if kept else NOTHING_KEPT)
        return self._code or 0

    def _say(self, text: str) -> None:
        # Line mode is off: a line's end is both characters. Output goes with the keys' echo, in one order.
        self._terminal.write(text.replace("\n", "\r\n"))

    async def _next(self) -> Key:
        if self._waiting:
            return self._waiting.pop(0)
        self._say(PROMPT)
        return await self._terminal.key()

    async def _do(self, key: Key) -> None:
        if key.text.startswith("/") and not key.pasted:
            await self._command(key.text.strip())
            return

        try:
            await self._turn(key.text)
        except BackplaneError as error:
            self._complain(error)

    def _complain(self, error: BackplaneError) -> None:
        self._say(f"{error.code}: {streams.one_line(error.message, 1000)}\n")
        self._say(f"  {streams.one_line(error.hint, 1000)}\n" if error.hint else "")

    # A turn -----------------------------------------------------------------------------------------------------------

    async def _turn(self, words: str) -> None:
        """Say something and show what comes, while keys are heard."""
        import anyio

        said, self._images = UserMessage(content=words, images=self._images), ()
        teller, before = Teller(self._say), self._session.losses
        self._terminal.shows = False
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._hear)
                async for event in self._session.send_message(said):
                    teller.tell(event)
                tasks.cancel_scope.cancel()
        finally:
            self._terminal.shows = True
        for loss in self._session.losses:
            if loss not in before:
                self._say(f"not carried: {streams.one_line(loss)}\n")
        self._say(f"({teller.usage_line})\n" if teller.usage_line else "")

    async def _hear(self) -> None:
        """Keys while the agent works: Ctrl-C stops the turn, an answer goes to its question, a line waits."""
        while True:
            key = await self._terminal.key()
            if key.kind == "interrupt":
                await self._session.interrupt()
                if self._asking is not None:
                    await self._asking.send(key)
            elif self._asking is not None:
                await self._asking.send(key)
            elif key.kind == "end":
                self._code = 0
                await self._session.interrupt()
            else:
                self._waiting.append(key)

    async def _on_ask(self, asked: Approval) -> Decision:
        """Put an approval to whoever sits there; what was typed or pasted before it is no answer."""
        import anyio

        if self._options.on_ask in ("allow", "deny"):
            return Decision(self._options.on_ask, f"--on-ask {self._options.on_ask}")
        self._say("\n" + asking.question(asked.message, asked.body))
        self._terminal.forget()
        send, receive = anyio.create_memory_object_stream[Any](1)
        self._asking, self._terminal.shows = send, True
        is_question = asked.kind == "input"
        try:
            while True:
                self._say("" if is_question else "[y]es, [n]o, [a]lways in this turn, or no and why: ")
                key = await receive.receive()
                if key.kind != "line":
                    return Decision("deny", "the user stopped the turn")
                if is_question:
                    return Decision("allow", "a person answered", text=key.text)
                if key.pasted:
                    self._say("(a paste is no answer: type it)\n")
                    continue
                decision = asking.judge(key.text, asked.body)
                if decision is not None:
                    return decision
        finally:
            self._asking, self._terminal.shows = None, False
            send.close()
            receive.close()

    # Commands ---------------------------------------------------------------------------------------------------------

    async def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        row = _COMMANDS.get(name)
        if row is None:
            self._say(f"no command /{streams.one_line(name, 40)}; /help lists them\n")
            return

        try:
            await row[1](self, rest.strip())
        except BackplaneError as error:
            self._complain(error)

    async def _help(self, _: str) -> None:
        self._say("".join(f"/{name:<9} {about}\n" for name, (about, _) in _COMMANDS.items()))

    async def _quit(self, _: str) -> None:
        self._code = 0

    async def _history(self, _: str) -> None:
        for message in self._session.get_history():
            self._say("".join(f"  {streams.printable(line)}\n" for line in message_lines(message)))

    async def _clear(self, _: str) -> None:
        self._session.clear_history()
        self._say("the agent knows nothing of what was said\n")

    async def _usage(self, _: str) -> None:
        used = self._session.get_usage()
        most = "≥ " if used.is_at_least else ""
        cost = "unknown" if used.cost_usd_micros is None else f"{most}${used.cost_usd_micros / 1e6:.4f}"
        counts = (used.input_tokens, used.output_tokens)
        words = ("unknown" if count is None else f"{most}{count}" for count in counts)
        self._say("tokens in {}, out {}; cost {}\n".format(*words, cost))

    async def _model(self, name: str) -> None:
        self._session.set_model(name or None)
        self._say(f"model {name or 'of the backend'} from the next turn on\n")

    async def _image(self, name: str) -> None:
        (image,) = order.images([name])
        self._images = (*self._images, image)
        self._say(f"{image.media_type}, shown with your next words\n")

    async def _system(self, text: str) -> None:
        self._session.set_system_prompt(text or None)
        self._say("from the next turn on\n")

    async def _diff(self, _: str) -> None:
        receipt = self._session.receipt
        patch = receipt.verification.git_diff if receipt is not None else None
        self._say("".join(f"{streams.printable(line)}\n" for line in (patch or "no changes").splitlines()))

    async def _handover(self, name: str) -> None:
        for loss in await self._session.handover(self._registry.get(name or None)):
            self._say(f"not carried: {streams.one_line(loss)}\n")
        self._say(f"with {self._session.provider} from here on\n")

    async def _losses(self, _: str) -> None:
        self._say("".join(f"{streams.one_line(loss)}\n" for loss in self._session.losses) or "nothing was lost\n")


_COMMANDS: Final[dict[str, tuple[str, Callable[[_Chat, str], Awaitable[None]]]]] = {
    "help": ("print this", _Chat._help),
    "history": ("print what was said", _Chat._history),
    "clear": ("begin anew; receipts stay", _Chat._clear),
    "usage": ("tokens and cost of the session", _Chat._usage),
    "diff": ("changes of the last turn", _Chat._diff),
    "losses": ("what could not be carried", _Chat._losses),
    "model": ("NAME: another model", _Chat._model),
    "image": ("FILE: show a picture with your next words", _Chat._image),
    "system": ("TEXT: other instructions", _Chat._system),
    "handover": ("NAME: go on with another backend", _Chat._handover),
    "quit": ("end; the session is kept", _Chat._quit),
}
