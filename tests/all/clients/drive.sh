#!/bin/sh
# Plays the cases of a file through the shell client and says in one line of JSON how each went.
. "$1"
plan=$2
work=$(mktemp -d)

member() { printf '%s' "$case" | jq -r "$1 // \"\""; }

one_digit_changed() {
  digit=$(grep -o '"duration_ms":[0-9]' "$1" | head -n 1)
  digit=${digit#*:}
  sed "s/\"duration_ms\":[0-9]/\"duration_ms\":$((digit % 9 + 1))/" "$1" >"$work/changed"
}

take_event() {
  { cat "$BACKPLANE_BODY" && echo; } >>"$work/events"
  grep -q '"type":"assistant_message"' "$BACKPLANE_BODY" || return
  case $when in
    cancel) backplane_cancel "$BACKPLANE_REF" 'the user changed his mind' ;;
    'kill the server') kill -KILL "$BACKPLANE_PID" ;;
    wait) jq -nc --arg cell "$cell" '{$cell, ready: true}' ;;
  esac
}

take_ask() {
  jq -r .name "$BACKPLANE_BODY" >>"$work/asks"
  backplane_answer "$BACKPLANE_REF" "$(jq -r .id "$BACKPLANE_BODY")" "$answers" "$(member .answer.reason)"
}

play() {
  : >"$work/events" >"$work/asks"
  when=$(member .when)
  backplane_submit "$(printf '%s' "$case" | jq -c .order)" ${answers:+ask}
  while backplane_next; do
    case $BACKPLANE_T in
      event) take_event ;;
      ask) take_ask ;;
      final | fatal) break ;;
    esac
  done
  jq -j 'select(.type == "assistant_message").text' "$work/events" >"$work/text"
  verified=false changed=null
  backplane_verify "$BACKPLANE_BODY" "$BACKPLANE_EVENTS" && verified=true
  if [ -n "$(member .change)" ]; then
    one_digit_changed "$BACKPLANE_BODY"
    changed=false
    backplane_verify "$work/changed" "$BACKPLANE_EVENTS" && changed=true
  fi
  [ -s "$BACKPLANE_BODY" ] || echo null >"$BACKPLANE_BODY"
  jq -c --arg cell "$cell" --arg ended "$BACKPLANE_T" --arg code "$BACKPLANE_CODE" --arg streamed "$BACKPLANE_EVENTS" \
    --argjson verified $verified --argjson changed $changed --rawfile asks "$work/asks" \
    --arg size "$(wc -c <"$work/text")" --arg hash "$(sha256sum <"$work/text")" \
    --argjson said "$(jq -c '{type, is_error}' "$work/events" | jq -sc .)" '{
      $cell, types: ($said | map(.type | select(. != "warning"))), text_bytes: ($size | tonumber), text_sha256: ($hash | .[:64]),
      tool_errors: ($said | map(select(.is_error)) | length), asks: ($asks | split("\n")[:-1]), end: $ended,
      code: (if $code == "" then null else $code end), outcome: .outcome?, reason: .usage_raw.backplane.end.reason?,
      as_streamed: ($streamed != ""), $verified, changed_verifies: $changed}' "$BACKPLANE_BODY"
}

play_many() {
  : >"$work/ended"
  number=0
  task=$(member .order.task)
  order=$(printf '%s' "$case" | jq -c '.order.task = "TASK" | .order')
  while [ $number -lt "$times" ]; do
    backplane_submit "${order%%TASK*}$task $number${order#*TASK}"
    printf '"text":"%s"' "$task $number" >"$work/$BACKPLANE_RUN"
    number=$((number + 1))
  done
  while [ $number -gt 0 ] && backplane_next; do
    case $BACKPLANE_T in
      event) grep -o '"text":"[^"]*"' "$BACKPLANE_BODY" | grep -qxFf "$work/$BACKPLANE_REF" && echo own >>"$work/ended" ;;
      final | fatal)
        number=$((number - 1))
        echo "$BACKPLANE_T" >>"$work/ended"
        backplane_verify "$BACKPLANE_BODY" && echo verified >>"$work/ended"
        ;;
    esac
  done
  jq -Rsc --arg cell "$cell" --argjson runs "$times" 'split("\n") as $all | def count($word): $all | map(select(. == $word)) | length;
    {$cell, $runs, finals: count("final"), verified: count("verified"), own: count("own")}' "$work/ended"
}

# The command has no word with a blank in it.
# shellcheck disable=SC2046
backplane_open $(jq -r '.command[]' "$plan") || exit 1
jq -c '.cases[]' "$plan" >"$work/cases"
while IFS= read -r case <&5; do
  times=$(member .times)
  answers=$(member .answer.decision)
  cell=$(member .cell)
  if [ -n "$times" ]; then play_many; else play; fi
done 5<"$work/cases"
backplane_close
rm -rf "$work"
