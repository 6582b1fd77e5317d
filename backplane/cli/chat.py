"""`chat`: a conversation in the terminal. Ctrl-C stops the turn and not the session; `/help` lists the commands.

Without a terminal each line of the input is one turn, and approvals are denied.
"""

from __future__ import annotations

import os
import signal
from typing import Final

import anyio

from backplane.cli import asking, lines, order, sessions, streams, terminal
from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.contract.approval import Decision
from backplane.contract.conversation import UserMessage
from backplane.contract.events import Approval
from backplane.errors import BackplaneError
from backplane.process.aio import ending_signals
from backplane.providers import ProviderRegistry, Session, SessionConfig
from backplane.view import ended, figures

HELP = "Hold a conversation in the terminal."
HELP_TEXT: Final = """\
/clear          start a new conversation; the receipts are kept
/diff           print the changes of the last turn
/model NAME     use another model from the next turn on
/handover NAME  continue with another backend
/quit           end the chat; the session stays stored
"""
EXAMPLE = "backplane chat --backend mine\nbackplane chat --continue"


def options(p: Parser) -> None:
    add.value(p, "-b", "--backend", metavar="NAME", help="talk to this backend (see `backplane backends`)")
    add.value(p, "--resume", metavar="ID", help="continue this session; `last` is the most recently used session")
    p.add_argument("-c", "--continue", dest="resume", action="store_const", const="last", help="same as --resume last")
    add.model(p)
    add.many(p, "--image", metavar="FILE", help="attach this picture to your first message")
    add.value(p, "--system", metavar="TEXT", help="give the agent these instructions for the whole conversation")
    add.root(p)
    add.in_place(p)
    add.value(
        p, "--policy", metavar="FILE",
        help="JSON policy file, or a built-in policy: default, strict or ci; "
        "with --resume it can only tighten the session's policy",
    )  # fmt: skip
    add.value(p, "--max-turns", metavar="N", type=int, help="end each reply after this many turns of the model")
    add.on_ask(p)
    add.config(p)


def run(args: Args) -> int:
    return sessions.with_registry(args, lambda registry: _Chat(registry, args).hold())


class _Chat:
    """A session, and the lines that a person or a program says to it."""

    def __init__(self, registry: ProviderRegistry, args: Args) -> None:
        self._registry, self._args, self._images = registry, args, order.images(args.image)
        self._is_person = streams.is_interactive()
        self._lines = lines.Reader(registry.plane.home)
        self._look = terminal.look(plain=not self._is_person)
        self._shown = terminal.Terminal(self._look, None)
        self._session: Session
        self._asking = anyio.CancelScope()
        """Ends the question that waits on the terminal."""
        self._code = 0

    async def hold(self) -> int:
        """Talk until Ctrl-D, `/quit` or the end of the input, and return the exit code."""
        async with await self._open() as self._session, anyio.create_task_group() as tasks:
            if self._is_person:
                tasks.start_soon(self._watch_signals, tasks.cancel_scope)
                tasks.start_soon(self._paint)
                model = f", {self._session.model}" if self._session.model else ""
                streams.write(f"{self._session.provider}{model}; /help lists the commands, Ctrl-D ends the chat\n")
            while True:
                try:
                    text = await self._lines.line(lines.MESSAGE)
                    if text is None or (self._is_person and text.strip() == "/quit"):
                        break
                    if self._is_person and text.startswith("/") and "\n" not in text:
                        await self._command(text.strip())
                    elif text.strip():
                        await self._send(text)
                except lines.Interrupted:  # Ctrl-C drops the line.
                    continue
                except BackplaneError as error:
                    if not self._is_person:
                        raise
                    streams.error(error)
            tasks.cancel_scope.cancel()
        if self._session.receipt is not None or self._args.resume is not None:
            streams.complain(f"to continue this session: backplane chat --resume {self._session.id[:8]}\n")
        return self._code

    async def _open(self) -> Session:
        """Begin the session that the options ask for, or continue it."""
        args, cwd = self._args, streams.folder()
        how = args.on_ask or ("prompt" if self._is_person else "deny")  # It asks by its own lines, on any terminal.
        config: SessionConfig = SessionConfig(
            root=str(cwd / args.root) if args.root else None if args.resume else str(cwd),
            mode="pass_through" if args.in_place else None,
            model=args.model,
            system_prompt=args.system,
            policy=args.policy,
            max_turns=args.max_turns,
            on_ask=self._on_ask if how == "prompt" else asking.callback(how, lambda: "", dict(os.environ)),
        )
        if args.resume is None:
            return await self._registry.get(args.backend).create_session(config)
        return await sessions.resumed(self._registry, args.resume, config, args.backend)

    async def _send(self, text: str) -> None:
        said, self._images = UserMessage(content=text, images=self._images), ()
        picture = terminal.picture(self._session.provider, self._session.model) if self._look.terminal else None
        self._shown = terminal.Terminal(self._look, picture)
        with lines.unseen():
            end = await sessions.show_turn(self._session, said, self._shown)
        self._shown = terminal.Terminal(self._look, None)
        if not self._is_person:
            self._code = 1 if end.stop_reason == "error" else self._code
        elif end.usage.total_tokens is not None:
            least = "at least " if end.usage.is_at_least else ""
            tokens_in, tokens_out = figures.count(end.usage.input_tokens), figures.count(end.usage.output_tokens)
            cost = figures.money(end.usage.cost_usd_micros)
            streams.write(f"{least}{tokens_in} tokens in, {tokens_out} out, cost {cost}\n")

    async def _paint(self) -> None:
        while True:
            await anyio.sleep(terminal.FRAME_S)
            if self._shown.is_due:
                streams.write(self._shown.frame())

    async def _watch_signals(self, scope: anyio.CancelScope) -> None:
        """Stop the turn at Ctrl-C, and end the chat at the other signals that end a program."""
        with anyio.open_signal_receiver(*ending_signals(), signal.SIGCONT) as received:
            async for number in received:
                if number == signal.SIGCONT:
                    self._shown.continued()
                elif number == signal.SIGINT:
                    await self._session.interrupt()
                    self._asking.cancel()
                else:
                    self._code = 128 + number
                    scope.cancel()

    async def _on_ask(self, asked: Approval) -> Decision:
        """Ask the person; what was typed or pasted before the question is no answer."""
        with self._shown.away(), anyio.CancelScope() as self._asking:
            streams.write(self._shown.clear())
            self._lines.drop()
            try:
                return await asking.ask(asked, streams.write, self._lines.line)
            except lines.Interrupted:
                await self._session.interrupt()
        return Decision("deny", "the user stopped the turn")

    async def _command(self, text: str) -> None:
        name, _, rest = text.partition(" ")
        match name:
            case "/clear":
                self._session.clear_history()
            case "/diff":
                patch = self._session.receipt.verification.git_diff if self._session.receipt is not None else None
                for line in ended.diff((patch or "no changes").splitlines(), self._look, "the receipt"):
                    streams.write(line)
            case "/model":
                self._session.set_model(rest or None)
            case "/handover":
                sessions.print_losses(await self._session.handover(self._registry.get(rest or None)))
            case _:
                streams.write(HELP_TEXT)
