#!/bin/sh
# One order from a shell, its questions answered here. Usage: client.sh CLIENT TASK FOLDER
# CLIENT is contracts/clients/backplane.sh, which a program of yours keeps beside itself; it needs jq.
. "$1"
backplane_open || exit 1
order=$(jq -nc --arg task "$2" --arg root "$3" '{$task, workspace: {$root}}')
backplane_submit "$order" ask
while backplane_next; do
  case $BACKPLANE_T in
    event) jq -r 'select(.type == "assistant_message").text' "$BACKPLANE_BODY" ;;
    ask) backplane_answer "$BACKPLANE_REF" "$(jq -r .id "$BACKPLANE_BODY")" deny "a person decides" ;;
    final | fatal) break ;;
  esac
done
verified='NOT VERIFIED'
backplane_verify "$BACKPLANE_BODY" "$BACKPLANE_EVENTS" && verified=verified
echo "$(jq -r .outcome "$BACKPLANE_BODY") $verified"
backplane_close
