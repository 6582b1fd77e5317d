"""`chat`: a conversation in the terminal. Ctrl-C stops the turn and not the session; `/help` lists the commands.

Without a terminal each line of the input is one turn, and approvals are denied.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import anyio

from backplane.cli import asking, lines, order, sessions, streams, terminal
from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.cli.sessions.show import message_lines
from backplane.contract.approval import Decision
from backplane.contract.conversation import Image, TokenUsage, UserMessage
from backplane.contract.events import Approval
from backplane.errors import BackplaneError
from backplane.process.aio import ending_signals
from backplane.providers import ProviderRegistry, Session, SessionConfig, store
from backplane.view import ended, figures

HELP = "Hold a conversation in the terminal."
HELP_TEXT: Final = """\
/help           print this
/history        print the conversation
/clear          begin anew; the agent forgets the conversation, receipts stay
/usage          print tokens and cost of the session
/diff           print the changes of the last turn
/model NAME     use another model from the next turn on
/system TEXT    give other instructions from the next turn on
/image FILE     show a picture with your next message
/handover NAME  continue with another backend
/quit           end; the session stays stored
"""
EXAMPLE = "backplane chat --backend mine\nbackplane chat --continue"


def options(p: Parser) -> None:
    add.value(p, "-b", "--backend", metavar="NAME", help="talk to this backend (see `backplane backends`)")
    add.value(p, "--resume", metavar="ID", help="continue this session; `last` is the one used last")
    p.add_argument("-c", "--continue", dest="resume", action="store_const", const="last", help="as --resume last")
    add.model(p)
    add.many(p, "--image", metavar="FILE", help="show this picture with your first words")
    add.value(p, "--system", metavar="TEXT", help="instructions for the whole conversation")
    add.root(p)
    add.in_place(p)
    add.value(
        p, "--policy", metavar="FILE", help="policy as JSON, or default, strict or ci; with --resume it only tightens"
    )
    add.value(p, "--max-turns", metavar="N", type=int, help="turns of the model in one turn of yours")
    add.on_ask(p)
    add.config(p)


def run(args: Args) -> int:
    images = order.images(args.image)
    return sessions.with_registry(args, lambda registry: _Chat(registry, args, images).hold())


class _Chat:
    """A session, and the lines that a person or a program says to it."""

    def __init__(self, registry: ProviderRegistry, args: Args, images: tuple[Image, ...]) -> None:
        self._registry, self._args, self._images = registry, args, images
        self._is_person = streams.is_interactive()
        self._lines = lines.Reader(registry.plane.home)
        self._look = terminal.look(plain=not self._is_person)
        self._shown = terminal.Terminal(self._look, None)
        self._session: Session
        self._is_working = False
        self._asking: anyio.CancelScope | None = None
        """Ends the question that waits on the terminal."""
        self._is_over = False
        self._code = 0

    async def hold(self) -> int:
        """Talk until Ctrl-D, `/quit` or the end of the input, and return the exit code."""
        how = self._args.on_ask or ("prompt" if self._is_person else "deny")
        on_ask = self._on_ask if how == "prompt" else asking.callback(how, lambda: "", dict(os.environ))
        async with await self._open(on_ask) as self._session, anyio.create_task_group() as tasks:
            if self._is_person:
                tasks.start_soon(self._watch_signals, tasks.cancel_scope)
                tasks.start_soon(self._paint)
                model = f", {self._session.model}" if self._session.model else ""
                streams.write(f"{self._session.provider}{model}; /help, Ctrl-D ends\n")
            while not self._is_over:
                with suppress(lines.Interrupted):  # Ctrl-C drops the line.
                    text = await self._lines.line(lines.MESSAGE)
                    if text is None:
                        break
                    if text.strip():
                        await self._do(text)
            tasks.cancel_scope.cancel()
        self._write_end()
        return self._code

    async def _open(self, on_ask: Callable[[Approval], Awaitable[Decision]] | None) -> Session:
        """Begin the session that the options ask for, or continue it."""
        args, home, cwd = self._args, self._registry.plane.home, streams.folder()
        config: SessionConfig = SessionConfig(
            root=str(cwd / args.root) if args.root else None if args.resume else str(cwd),
            mode=add.mode_of(args.in_place),
            model=args.model,
            system_prompt=args.system,
            policy=args.policy,
            max_turns=args.max_turns,
            on_ask=on_ask,
        )
        if args.resume is None:
            return await self._registry.get(args.backend).create_session(config)
        id = store.find(home, args.resume)
        name = args.backend or store.read(store.path_of(home, id)).provider
        return await self._registry.get(name).resume(id, config)

    def _write_end(self) -> None:
        id = self._session.id
        if not store.path_of(self._registry.plane.home, id).exists():  # It is written with the first turn.
            streams.complain("no message was sent, so no session is stored\n")
        elif self._is_person:
            streams.write(f"backplane chat --resume {id[:8]}\n")
        else:
            streams.complain(f"session {id}\n")

    async def _do(self, text: str) -> None:
        """Do a command, or send a message."""
        try:
            if self._is_person and text.startswith("/") and "\n" not in text:
                await self._command(text.strip())
            else:
                await self._send(text)
        except BackplaneError as error:
            if not self._is_person:
                raise
            streams.error(error)

    async def _send(self, text: str) -> None:
        said, self._images = UserMessage(content=text, images=self._images), ()
        if self._look.terminal:
            self._shown = terminal.Terminal(self._look, terminal.picture(self._session.provider, self._session.model))
        self._is_working = True
        try:
            with lines.unseen():
                end = await sessions.show_turn(self._session, said, self._shown)
        finally:
            self._is_working = False
        if not self._is_person:
            self._code = 1 if end.stop_reason == "error" else self._code
        elif end.usage.total_tokens is not None:
            streams.write(_usage(end.usage))

    async def _paint(self) -> None:
        while True:
            await anyio.sleep(terminal.FRAME_S)
            if self._is_working and self._shown.is_due:
                streams.write(self._shown.frame())

    async def _watch_signals(self, scope: anyio.CancelScope) -> None:
        """Stop the turn at Ctrl-C, and end the chat at the other signals that end a program."""
        with anyio.open_signal_receiver(*ending_signals(), signal.SIGCONT) as received:
            async for number in received:
                if number == signal.SIGCONT:
                    self._shown.continued()
                elif number != signal.SIGINT:
                    self._code = 128 + number
                    scope.cancel()
                elif self._is_working:
                    await self._session.interrupt()
                    if self._asking is not None:
                        self._asking.cancel()

    async def _on_ask(self, asked: Approval) -> Decision:
        """Ask the person; what was typed or pasted before the question is no answer."""
        with self._shown.away():
            streams.write(self._shown.clear())
            self._lines.drop()
            try:
                with anyio.CancelScope() as self._asking:
                    return await asking.ask(asked, streams.write, self._lines.line)
            except lines.Interrupted:
                await self._session.interrupt()
            finally:
                self._asking = None
        return Decision("deny", "the user stopped the turn")

    # Commands ---------------------------------------------------------------------------------------------------------

    async def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        session, write = self._session, streams.write
        match name:
            case "help":
                write(HELP_TEXT)
            case "quit":
                self._is_over = True
            case "history":
                for message in session.get_history():
                    write("".join(f"  {streams.printable(line)}\n" for line in message_lines(message)))
            case "clear":
                session.clear_history()
            case "usage":
                write(_usage(session.get_usage()))
            case "diff":
                patch = session.receipt.verification.git_diff if session.receipt is not None else None
                for line in ended.diff((patch or "no changes").splitlines(), self._look, "the receipt"):
                    write(line)
            case "model":
                session.set_model(rest or None)
            case "system":
                session.set_system_prompt(rest or None)
            case "image":
                self._images += order.images([rest])
            case "handover":
                sessions.print_losses(await session.handover(self._registry.get(rest or None)))
            case _:
                write(f"no command /{streams.one_line(name, 40)}; /help lists them\n")


def _usage(used: TokenUsage) -> str:
    least = "at least " if used.is_at_least else ""
    tokens_in, tokens_out = figures.count(used.input_tokens), figures.count(used.output_tokens)
    return f"{least}{tokens_in} tokens in, {tokens_out} out, cost {figures.money(used.cost_usd_micros)}\n"
