# Drives `backplane serve` from a POSIX shell: orders in, events, asks and one sealed receipt a run out.
# Needs jq and a SHA-256 program. Source it:  . ./backplane.sh
# The protocol is in ../sidecar.md; its rules are named S1…. What the server says is kept in a
# temporary folder until backplane_close, as a shell cannot hold or read large messages.
#
#   backplane_open [COMMAND…]            start a server (`backplane serve`), wait for its hello
#   backplane_submit ORDER [ask]         send an order (JSON text); sets BACKPLANE_RUN; with `ask` you answer asks
#   backplane_next                       wait for the next message; false when the server is gone. Sets
#       BACKPLANE_T      event, ask, final, fatal, or another message's name
#       BACKPLANE_REF    the run it is about; empty for none
#       BACKPLANE_CODE   fatal: its error code
#       BACKPLANE_BODY   a file, until the next call. event: the event. final, fatal: the receipt, empty where
#                        there is none. Else: the whole message
#       BACKPLANE_EVENTS final, fatal: a file with the run's events, one a line, where the receipt was too long
#                        to carry them; else empty
#   backplane_answer RUN ASK_ID DECISION [REASON]      allow or deny
#   backplane_cancel RUN [REASON]
#   backplane_verify RECEIPT [EVENTS]    is the hash right? Both are files as above
#   backplane_close                      let go of the server; open runs are cancelled by it

BACKPLANE_CLOSE_S_MAX=5
BACKPLANE_SPOOL_S_MAX=5

# One jq for the whole session says what each line is and where its body stands: t, ref_id, error_code, trace, offset,
# length. Quotes inside a string are escaped, so the first `,"event":` is the member itself; it is the last one.
_backplane_index='
  def word: if type == "string" and . != "" then gsub("\\s"; "_") else "-" end;
  def mark: {event: ",\"event\":", final: ",\"receipt\":", fatal: ",\"receipt\":"}[.t];
  foreach (inputs | {line: ., said: (try fromjson catch null)}) as {$line, $said} ({at: 0};
    .start = .at | .at += ($line | utf8bytelength) + 1;
    select(($said | type) == "object" and ($said.t | type) == "string") # else noise (S2)
    | ($said | mark) as $mark
    | (if $mark then ($line | split($mark)[0] | utf8bytelength) + ($mark | length) else 0 end) as $skipped
    | [($said | .t, .ref_id, .error_code, .trace | word),
       .start + $skipped, ([.at - 1 - .start - $skipped - (if $mark then 1 else 0 end), 0] | max)]
    | map(tostring) | join(" "))'

backplane_open() {
  [ $# -gt 0 ] || set -- backplane serve
  BACKPLANE_DIR=$(mktemp -d) || return 1
  BACKPLANE_BODY=$BACKPLANE_DIR/body
  BACKPLANE_COUNT=0
  mkfifo "$BACKPLANE_DIR/in" "$BACKPLANE_DIR/said" "$BACKPLANE_DIR/lines" "$BACKPLANE_DIR/index" || return 1
  "$@" <"$BACKPLANE_DIR/in" >"$BACKPLANE_DIR/said" &
  BACKPLANE_PID=$!
  tee "$BACKPLANE_DIR/lines" <"$BACKPLANE_DIR/said" >"$BACKPLANE_DIR/spool" &
  jq -n -R -r --unbuffered "$_backplane_index" <"$BACKPLANE_DIR/lines" >"$BACKPLANE_DIR/index" &
  exec 3>"$BACKPLANE_DIR/in" 4<"$BACKPLANE_DIR/index"
  while backplane_next; do
    [ "$BACKPLANE_T" = hello ] && return 0
  done
  backplane_close
  return 1
}

# The write goes through a process of its own: a server that is gone must not end this shell.
_backplane_send() { (printf '%s\n' "$1" >&3) 2>/dev/null; }

backplane_submit() {
  BACKPLANE_COUNT=$((BACKPLANE_COUNT + 1))
  BACKPLANE_RUN=sh-$$-$BACKPLANE_COUNT
  _backplane_ask=
  [ "${2-}" = ask ] && _backplane_ask=',"ask/1"'
  # An order is JSON already: only its line breaks must go, and in JSON these are blanks.
  _backplane_send "{\"t\":\"run\",\"id\":\"$BACKPLANE_RUN\",\"work_order\":$(printf '%s' "$1" | tr '\n' ' '),\"extensions\":[\"cancel/1\",\"ping/1\",\"many/1\",\"stage/1\"$_backplane_ask]}"
}

backplane_answer() {
  _backplane_send "$(jq -nc --arg run "$1" --arg id "$2" --arg decision "$3" --arg reason "${4-}" \
    '{t: "answer", ref_id: $run, id: $id, decision: $decision} + if $reason == "" then {} else {reason: $reason} end')"
}

backplane_cancel() {
  _backplane_send "$(jq -nc --arg run "$1" --arg reason "${2-}" \
    '{t: "cancel", ref_id: $run, reason: (if $reason == "" then null else $reason end), grace_ms: 2000}')"
}

backplane_next() {
  BACKPLANE_EVENTS=
  if IFS=' ' read -r BACKPLANE_T BACKPLANE_REF BACKPLANE_CODE _backplane_trace _backplane_at _backplane_size <&4; then
    [ "$BACKPLANE_REF" != - ] || BACKPLANE_REF=
    [ "$BACKPLANE_CODE" != - ] || BACKPLANE_CODE=
    _backplane_fetch && _backplane_keep && return 0
  fi
  BACKPLANE_T=fatal BACKPLANE_REF='' BACKPLANE_CODE=backend_crashed
  : >"$BACKPLANE_BODY"
  return 1
}

# The index may be quicker than the spool, by the time tee takes from one write to the next.
_backplane_fetch() {
  _backplane_naps=0
  until tail -c "+$((_backplane_at + 1))" "$BACKPLANE_DIR/spool" 2>/dev/null | head -c "$_backplane_size" >"$BACKPLANE_BODY" &&
    [ "$(wc -c <"$BACKPLANE_BODY")" -eq "$_backplane_size" ]; do
    _backplane_naps=$((_backplane_naps + 1))
    [ $_backplane_naps -le $BACKPLANE_SPOOL_S_MAX ] && sleep 1 || return 1
  done
}

# Events stay in a file a run until its end says that nobody needs them.
_backplane_keep() {
  case $BACKPLANE_REF in
    *[!a-z0-9-]* | '') return 0 ;; # Not an id that backplane_submit gave: it must name no file.
  esac
  case $BACKPLANE_T in
    event) { cat "$BACKPLANE_BODY" && echo; } >>"$BACKPLANE_DIR/$BACKPLANE_REF" ;;
    final | fatal)
      if [ "$_backplane_trace" = as_streamed ]; then
        BACKPLANE_EVENTS=$BACKPLANE_DIR/$BACKPLANE_REF
      else
        rm -f "$BACKPLANE_DIR/$BACKPLANE_REF"
      fi
      ;;
  esac
}

backplane_verify() {
  _backplane_named=$(LC_ALL=C grep -o '"receipt_sha256":"[0-9a-f]\{64\}"' "$1" | head -n 1 | cut -d '"' -f 4)
  [ -n "$_backplane_named" ] || return 1
  # The first one is the receipt's own: nothing free-form stands before it. Canonical bytes have no line breaks.
  _backplane_found=$(
    LC_ALL=C sed -e 's/"receipt_sha256":"[0-9a-f]*"/"receipt_sha256":null/' -e "${2:+"s/\"trace\":\\[\\]/\"trace\":[\\
]/"}" "$1" | _backplane_splice "${2-}" | _backplane_sha256
  )
  [ "${_backplane_found%% *}" = "$_backplane_named" ]
}

# The events between the two lines that come in; or the one line alone.
_backplane_splice() {
  if [ -n "$1" ]; then
    IFS= read -r _backplane_before
    printf '%s' "$_backplane_before"
    paste -s -d , "$1" | tr -d '\n'
  fi
  tr -d '\n'
}

_backplane_sha256() {
  if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi
}

backplane_close() {
  exec 3>&- 4<&-
  (
    trap 'kill "$nap"; exit' TERM
    sleep "$BACKPLANE_CLOSE_S_MAX" &
    nap=$!
    wait "$nap" && kill -KILL "$BACKPLANE_PID"
  ) >/dev/null 2>&1 &
  _backplane_patience=$!
  wait "$BACKPLANE_PID" 2>/dev/null
  kill "$_backplane_patience" 2>/dev/null
  wait "$_backplane_patience" 2>/dev/null
  rm -rf "$BACKPLANE_DIR"
}
