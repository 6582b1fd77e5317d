// Package host is the host's end of the line: hello, many runs at once, asks, cancel, ping, and every way to end.
// One file, standard library only. The rules are those of ../../sidecar.md.
//
//	host.Serve(host.Host{ID: "mine", Capabilities: host.Levels{"streaming": "native"}},
//		func(ctx context.Context, run *host.Run) (host.Done, error) {
//			run.Event("assistant_message", host.Members{"text": run.Order.Task})
//			return host.Done{}, nil
//		})
package host

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"
)

const (
	version      = "abp/v0.1"
	lineBytesMax = 16 << 20               // S4
	depthMax     = 128                    // S3
	graceUsual   = 2 * time.Second        // S51: where the canceller named none
	graceMargin  = 300 * time.Millisecond // Kept back from a grace, so that the end is still in time.
	askMax       = 300 * time.Second
	peerLook     = time.Second

	nameCharsMax    = 256 // Of a tool's name.
	patternBytesMax = 1024
)

var extensions = []string{"cancel/1", "ping/1", "ask/1", "many/1"}

// Members are the members of a JSON object.
type Members = map[string]any

// Levels are capabilities and their support levels.
type Levels = map[string]any

// Host says who it is and what it can.
type Host struct {
	ID           string
	Version      string
	Capabilities Levels
	Heeds        []string // Settings of an order that Work does something with (S9); nil for the usual ones.
}

// Order is what the control plane asks for; Raw has all of it.
type Order struct {
	ID        string `json:"id"`
	Task      string `json:"task"`
	Workspace struct {
		Root string `json:"root"`
	} `json:"workspace"`
	Policy struct {
		Allowed      []string `json:"allowed_tools"`
		Disallowed   []string `json:"disallowed_tools"`
		NeedApproval []string `json:"require_approval_for"`
	} `json:"policy"`
	Config struct {
		Model  *string                    `json:"model"`
		Vendor map[string]json.RawMessage `json:"vendor"`
		Env    map[string]string          `json:"env"`
	} `json:"config"`
	Raw json.RawMessage `json:"-"`
}

// Done is what a run came to; the zero value is complete.
type Done struct {
	Outcome   string // complete, partial or failed
	Usage     Members
	UsageRaw  Members
	Artifacts []Members
}

// Verdict answers an ask. With "modify", Input (or Text) is what to use instead.
type Verdict struct {
	Decision string          `json:"decision"`
	Input    json.RawMessage `json:"input"`
	Text     string          `json:"text"`
	Reason   string          `json:"reason"`
}

// Error carries one of the codes of ../../errors.md into a run's `fatal`.
type Error struct{ Code, Text string }

func (e Error) Error() string { return e.Text }

// Work does one run. Its context ends when the run is cancelled.
type Work func(ctx context.Context, run *Run) (Done, error)

type line struct {
	host     Host
	work     Work
	out      *os.File
	writing  sync.Mutex
	mutex    sync.Mutex
	runs     map[string]*Run
	open     sync.WaitGroup
	stdin    bool
	ending   sync.Once
	backend  Members
	exitCode int
}

// Serve is a host on this process's stdin and stdout; it ends the process with the end of stdin and of the last run.
func Serve(host Host, work Work) {
	l := &line{host: host, work: work, out: os.Stdout, runs: map[string]*Run{}, stdin: true}
	os.Stdout = os.Stderr // S2: what is printed is no message.
	if l.host.Capabilities == nil {
		l.host.Capabilities = Levels{}
	}
	if l.host.Heeds == nil {
		l.host.Heeds = []string{"model", "max_turns", "max_budget_usd", "context"}
	}
	l.backend = Members{"id": host.ID, "backend_version": orNull(host.Version), "adapter_version": nil}
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	go l.watch(signals, os.Getppid())
	l.send(Members{"t": "hello", "contract_version": version, "backend": l.backend,
		"capabilities": l.host.Capabilities, "mode": "mapped", "extensions": extensions, "heeds": l.host.Heeds})
	l.readLines()
	l.stdinEnded()
	l.open.Wait()
	os.Exit(l.exitCode)
}

func orNull(text string) any {
	if text == "" {
		return nil
	}
	return text
}

// Signals, and a parent that is gone (S36, S37).
func (l *line) watch(signals chan os.Signal, parent int) {
	look := time.NewTicker(peerLook)
	for {
		select {
		case got := <-signals:
			if got != syscall.SIGPIPE { // The write that caused it says so itself.
				l.endAll(fmt.Sprintf("the host got %v", got), 0)
			}
		case <-look.C:
			if os.Getppid() != parent {
				l.endAll("the control plane is gone", 1)
			}
		}
	}
}

// Cancel what runs, and end within the grace whatever the host's own code does.
func (l *line) endAll(reason string, code int) {
	l.ending.Do(func() {
		go func() {
			time.AfterFunc(graceUsual-graceMargin, func() { os.Exit(1) })
			for _, run := range l.all() {
				run.cancel(reason, graceUsual-graceMargin)
			}
			l.open.Wait()
			os.Exit(code)
		}()
	})
}

func (l *line) all() []*Run {
	l.mutex.Lock()
	defer l.mutex.Unlock()
	var runs []*Run
	for _, run := range l.runs {
		runs = append(runs, run)
	}
	return runs
}

// Write one message whole; a slow reader makes this wait (S25).
func (l *line) send(message Members) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(message); err != nil {
		fmt.Fprintln(os.Stderr, "not sent:", err)
		return
	}
	l.writing.Lock()
	_, err := l.out.Write(text.Bytes())
	l.writing.Unlock()
	if err != nil {
		l.endAll("nobody reads this host", 1)
	}
}

func (l *line) complain(refID any, code, text string) {
	l.send(Members{"t": "fatal", "ref_id": refID, "error": text, "error_code": code})
}

func (l *line) readLines() {
	reader := bufio.NewReaderSize(os.Stdin, 64<<10)
	var held []byte
	size := 0
	for {
		piece, err := reader.ReadSlice('\n')
		if size += len(piece); size <= lineBytesMax+1 {
			held = append(held, piece...)
		}
		if err == bufio.ErrBufferFull {
			continue
		}
		// S35: a last line without its newline counts.
		if size > lineBytesMax+1 {
			l.complain(nil, "protocol_invalid_envelope", fmt.Sprintf("a line is over %d bytes", lineBytesMax))
		} else if len(bytes.TrimSpace(held)) > 0 { // S7
			l.take(held)
		}
		if err != nil {
			return
		}
		held, size = nil, 0
	}
}

func (l *line) take(text []byte) {
	if err := strict(text); err != nil {
		l.complain(nil, "protocol_invalid_envelope", "unreadable line: "+err.Error())
		return
	}
	var message map[string]json.RawMessage
	if json.Unmarshal(text, &message) != nil {
		return
	}
	switch text := textOf(message["t"]); {
	case text == nil:
	case *text == "run":
		l.begin(message)
	case *text == "cancel":
		if run := l.find(message["ref_id"]); run != nil {
			grace, err := strconv.ParseInt(string(message["grace_ms"]), 10, 32)
			if err != nil {
				grace = graceUsual.Milliseconds()
			}
			reason := "cancelled by the control plane"
			if said := textOf(message["reason"]); said != nil {
				reason = *said
			}
			run.cancel(reason, time.Duration(grace)*time.Millisecond)
		}
	case *text == "answer":
		var verdict Verdict
		run, id := l.find(message["ref_id"]), textOf(message["id"])
		raw, _ := json.Marshal(message)
		if run != nil && id != nil && json.Unmarshal(raw, &verdict) == nil {
			run.answered(*id, verdict)
		}
	case *text == "ping":
		if _, err := strconv.ParseUint(string(message["seq"]), 10, 64); err == nil {
			l.send(Members{"t": "pong", "seq": message["seq"]})
		}
	}
}

func textOf(raw json.RawMessage) *string {
	var text *string
	if json.Unmarshal(raw, &text) != nil {
		return nil
	}
	return text
}

func (l *line) find(refID json.RawMessage) *Run {
	id := textOf(refID)
	if id == nil {
		return nil
	}
	l.mutex.Lock()
	defer l.mutex.Unlock()
	return l.runs[*id]
}

var uuid = regexp.MustCompile(`^(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func (l *line) begin(message map[string]json.RawMessage) {
	id := textOf(message["id"])
	if id != nil && l.find(message["id"]) != nil {
		l.complain(nil, "protocol_unexpected_message", "a run of this id is open already")
		return
	}
	run := &Run{line: l, started: time.Now(), asks: map[string]chan Verdict{}, grace: graceUsual}
	var order map[string]json.RawMessage
	wrong := json.Unmarshal(message["work_order"], &order) != nil || textOf(order["task"]) == nil ||
		json.Unmarshal(message["work_order"], &run.Order) != nil || !uuid.MatchString(run.Order.ID) || run.Order.Workspace.Root == ""
	if id == nil || wrong {
		l.complain(id, "contract_schema_violation", "a run needs an id and an order with id, task and workspace.root")
		return
	}
	if root, err := filepath.Abs(run.Order.Workspace.Root); err == nil { // S20: against the folder that we were started in
		run.Order.Workspace.Root = root
	}
	policy, err := run.Order.Policy, error(nil)
	if run.allowed, err = CompileGlobs(policy.Allowed); err == nil {
		if run.denied, err = CompileGlobs(policy.Disallowed); err == nil {
			run.open, err = CompileGlobs(policy.NeedApproval)
		}
	}
	if err != nil {
		l.complain(id, "policy_invalid", err.Error())
		return
	}
	run.ID, run.Order.Raw = *id, message["work_order"]
	json.Unmarshal(message["extensions"], &run.extensions) // Absent means none.
	run.ctx, run.stop = context.WithCancelCause(context.Background())
	l.mutex.Lock()
	l.runs[run.ID] = run
	l.mutex.Unlock()
	l.open.Add(1)
	go run.do()
}

func (l *line) stdinEnded() {
	l.mutex.Lock()
	l.stdin = false
	l.mutex.Unlock()
	for _, run := range l.all() {
		if run.announced("cancel/1") {
			run.cancel("the control plane is gone", graceUsual) // S34
		}
		run.settleAll()
	}
}

// Run is one run: the order, and the ways to say what happens.
type Run struct {
	ID    string
	Order Order

	line       *line
	extensions []string
	ctx        context.Context
	stop       context.CancelCauseFunc
	mutex      sync.Mutex
	started    time.Time
	grace      time.Duration
	said       int
	asked      int
	asks       map[string]chan Verdict
	allowed    Globs
	denied     Globs
	open       Globs // Tools that need an approval.
	over       bool
}

// Environ is this process's environment with the order's over it (S20).
func (r *Run) Environ() []string {
	environ := os.Environ()
	for name, value := range r.Order.Config.Env {
		environ = append(environ, name+"="+value)
	}
	return environ
}

// Event sends one event, for example Event("tool_call", Members{"tool_name": …, "input": …}).
func (r *Run) Event(kind string, members Members) {
	event := Members{"ts": now(), "type": kind}
	for name, value := range members {
		event[name] = value
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if !r.over {
		r.said++
		r.line.send(Members{"t": "event", "ref_id": r.ID, "event": event})
	}
}

// Grace is the time for the host's own clean-up once the run is cancelled.
func (r *Run) Grace() time.Duration {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.grace
}

// May asks before a tool runs. A denial is a tool result, not an end.
func (r *Run) May(name string, input any, more Members) Verdict {
	names := namesOf(name)
	denial := Verdict{Decision: "deny", Reason: "the policy denies " + name}
	forbidden := name == "" || utf8.RuneCountInString(name) > nameCharsMax || r.denied.Match(names...) ||
		(len(r.allowed) > 0 && !r.allowed.Match(names...))
	if !r.canAsk() && forbidden {
		return denial
	}
	if !r.canAsk() && !r.open.Match(names...) {
		return Verdict{Decision: "allow"}
	}
	ask := Members{"kind": "tool", "name": name, "input": input, "default": "deny"}
	for member, value := range more {
		ask[member] = value
	}
	answer := r.Ask(ask)
	if forbidden { // Asked all the same: only so the receipt knows that it did not run.
		return denial
	}
	// S56: what was to be changed never runs as it was.
	var changed map[string]any
	if answer.Decision == "modify" && (json.Unmarshal(answer.Input, &changed) != nil || changed == nil) {
		return Verdict{Decision: "deny", Reason: "the answer is modify and gives no input"}
	}
	if answer.Decision == "allow" && len(answer.Input) > 0 && string(answer.Input) != "null" {
		return Verdict{Decision: "deny", Reason: "the answer is allow and gives another input"}
	}
	return answer
}

// Ask puts any ask of S55. Where nobody can answer, the default decides.
func (r *Run) Ask(members Members) Verdict {
	byDefault := Verdict{Decision: "deny", Reason: "nobody is there to answer"}
	if members["default"] == "allow" {
		byDefault.Decision = "allow"
	}
	if !r.canAsk() {
		return byDefault
	}
	answered := make(chan Verdict, 1)
	r.mutex.Lock()
	r.asked++
	id := fmt.Sprintf("ask-%d", r.asked)
	r.asks[id] = answered
	r.mutex.Unlock()
	ask := Members{"t": "ask", "ref_id": r.ID, "id": id, "deadline_ms": askMax.Milliseconds()}
	for member, value := range members {
		ask[member] = value
	}
	r.line.send(ask)
	if !r.canAsk() { // Stdin ended between the two looks.
		r.settleAll()
	}
	select {
	case verdict, more := <-answered:
		if more {
			return verdict
		}
	case <-r.ctx.Done():
	case <-time.After(askMax):
	}
	r.mutex.Lock()
	delete(r.asks, id)
	r.mutex.Unlock()
	return byDefault
}

func (r *Run) canAsk() bool {
	r.line.mutex.Lock()
	defer r.line.mutex.Unlock()
	return r.line.stdin && r.ctx.Err() == nil && r.announced("ask/1")
}

func (r *Run) announced(extension string) bool {
	for _, name := range r.extensions {
		if name == extension {
			return true
		}
	}
	return false
}

func (r *Run) answered(id string, verdict Verdict) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	known := verdict.Decision == "allow" || verdict.Decision == "deny" || verdict.Decision == "modify"
	if answered := r.asks[id]; answered != nil && known { // S57: any other is ignored.
		delete(r.asks, id)
		answered <- verdict
	}
}

func (r *Run) settleAll() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	for id, answered := range r.asks {
		delete(r.asks, id)
		close(answered)
	}
}

func (r *Run) cancel(reason string, grace time.Duration) {
	if r.ctx.Err() != nil {
		return // S52
	}
	r.mutex.Lock()
	r.grace = max(grace-graceMargin, 0)
	r.mutex.Unlock()
	r.stop(Error{"stream_closed", reason})
}

func (r *Run) do() {
	defer r.line.open.Done()
	r.Event("run_started", Members{"message": r.line.host.ID + " starts"})
	type result struct {
		done Done
		err  error
	}
	results := make(chan result, 1)
	go func() {
		done, err := r.line.work(r.ctx, r)
		results <- result{done, err}
	}()
	var ended result
	select {
	case ended = <-results:
	case <-r.ctx.Done():
		select {
		case ended = <-results:
		case <-time.After(r.Grace()):
			r.end(Done{}, Error{"backend_timeout", "it did not end in the grace"})
			return
		}
	}
	if r.ctx.Err() != nil {
		ended.err = nil // What a cancelled agent complains about is that it was cancelled.
	} else if ended.err == nil {
		r.Event("run_completed", Members{"message": r.line.host.ID + " ends: " + r.outcome(ended.done)})
	}
	r.end(ended.done, ended.err)
}

func (r *Run) end(done Done, err error) {
	message := Members{"t": "final", "ref_id": r.ID, "receipt": r.receipt(done)}
	if err != nil {
		var coded Error
		if !errors.As(err, &coded) {
			coded.Code = "internal"
		}
		message = Members{"t": "fatal", "ref_id": r.ID, "error": err.Error(), "error_code": coded.Code}
	}
	r.mutex.Lock()
	r.over = true
	r.mutex.Unlock()
	r.line.mutex.Lock()
	delete(r.line.runs, r.ID)
	r.line.mutex.Unlock()
	r.stop(nil)
	r.line.send(message)
}

func (r *Run) outcome(done Done) string {
	switch {
	case r.ctx.Err() != nil && done.Outcome != "complete" && r.said > 1:
		return "partial"
	case r.ctx.Err() != nil && done.Outcome != "complete":
		return "failed"
	case done.Outcome == "":
		return "complete"
	}
	return done.Outcome
}

func (r *Run) receipt(done Done) Members {
	raw := Members{}
	for name, value := range done.UsageRaw {
		raw[name] = value
	}
	if cause := context.Cause(r.ctx); cause != nil {
		raw["cancelled"] = cause.Error()
	}
	id, finished := r.ID, time.Now()
	if !uuid.MatchString(id) {
		id = newID()
	}
	if finished.Before(r.started) {
		finished = r.started
	}
	artifacts := done.Artifacts
	if artifacts == nil {
		artifacts = []Members{}
	}
	usage := done.Usage
	if usage == nil {
		usage = Members{}
	}
	return Members{
		"meta": Members{"run_id": id, "work_order_id": r.Order.ID, "contract_version": version,
			"started_at": stamp(r.started), "finished_at": stamp(finished),
			"duration_ms": time.Since(r.started).Milliseconds()},
		"backend": r.line.backend, "capabilities": r.line.host.Capabilities, "mode": "mapped",
		"usage_raw": raw, "usage": usage, "artifacts": artifacts, "outcome": r.outcome(done),
		// S32, S33: the control plane has seen the trace and seals the receipt.
		"trace": []any{}, "verification": Members{"harness_ok": true}, "receipt_sha256": nil,
	}
}

func now() string { return stamp(time.Now()) }

func stamp(at time.Time) string { return at.UTC().Format("2006-01-02T15:04:05.000000Z") }

func newID() string {
	var id [16]byte
	rand.Read(id[:])
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// Both spellings of a tool, as ../../policy-rules.md has them.
var spellings = map[string]string{
	"Read": "read_file", "Write": "write_file", "Edit": "edit_file", "MultiEdit": "multi_edit", "LS": "list_files", "Glob": "glob",
	"Grep": "grep", "Bash": "bash", "WebFetch": "web_fetch", "WebSearch": "web_search",
}

// Names by which agents call a tool that runs a command line; each is bash, too.
var shells = map[string]bool{
	"Shell": true, "shell": true, "local_shell": true, "run_shell_command": true, "run_command": true, "run_terminal_cmd": true,
	"run_in_terminal": true, "execute_command": true, "exec_command": true, "Terminal": true, "terminal": true,
}

// Every name a tool goes by: its own, the neutral one, and the neutral one's second spelling.
func namesOf(name string) []string {
	neutral, known := spellings[name]
	if shells[name] {
		neutral = "bash"
	} else if !known {
		neutral = name
	}
	names := []string{name, neutral}
	for spelling, of := range spellings {
		if of == neutral {
			names = append(names, spelling)
		}
	}
	return names
}

// Globs is a list of patterns of ../../policy-rules.md.
type Globs []*regexp.Regexp

// CompileGlobs reads the patterns; one that is none is an Error with the code policy_invalid.
func CompileGlobs(patterns []string) (Globs, error) {
	globs := Globs{}
	for _, pattern := range patterns {
		text, fact := expression(pattern)
		if fact != "" {
			return nil, Error{"policy_invalid", fmt.Sprintf("glob %.80q %s", pattern, fact)}
		}
		compiled, err := regexp.Compile(`(?s)^(?:` + text + `)$`)
		if err != nil {
			return nil, Error{"policy_invalid", fmt.Sprintf("glob %.80q: %v", pattern, err)}
		}
		globs = append(globs, compiled)
	}
	return globs, nil
}

// Match tells whether one of the patterns matches one of the names.
func (g Globs) Match(names ...string) bool {
	for _, one := range g {
		for _, name := range names {
			if one.MatchString(wide(name)) {
				return true
			}
		}
	}
	return false
}

// Bytes as characters: the glob language counts bytes.
func wide(text string) string {
	letters := make([]rune, len(text))
	for at := range letters {
		letters[at] = rune(text[at])
	}
	return string(letters)
}

func escaped(letter rune) string {
	text := ""
	for _, one := range []byte(string(letter)) {
		text += fmt.Sprintf(`\x%02x`, one)
	}
	return text
}

// The regular expression of one pattern, or what is wrong with it.
func expression(pattern string) (string, string) {
	if len(pattern) > patternBytesMax {
		return "", fmt.Sprintf("is longer than %d bytes", patternBytesMax)
	}
	type brace struct {
		choices []string
		text    string
	}
	letters, open := []rune(pattern), []*brace{{}} // The pattern, and in it each brace that is open.
	is := func(at int, letter rune) bool { return at >= 0 && at < len(letters) && letters[at] == letter }
	for at := 0; at < len(letters); at++ {
		letter, choice := letters[at], open[len(open)-1]
		switch {
		case letter == '*' && is(at+1, '*'):
			starts := choice.text == ""
			whole := is(at+2, '/') && (starts || is(at-1, '/'))
			if !whole || (starts && at+3 == len(letters) && len(open) == 1) {
				choice.text += ".*"
			} else {
				choice.text += "(?:.*/)?"
			}
			at++
			if whole {
				at++
			}
		case letter == '*':
			choice.text += ".*"
		case letter == '?':
			choice.text += "."
		case letter == '[':
			from, not := at+1, ""
			if is(from, '!') || is(from, '^') {
				from, not = from+1, "^"
			}
			end := from + 1 // A `]` right at the start is a member.
			for end < len(letters) && letters[end] != ']' {
				end++
			}
			if end >= len(letters) {
				return "", "has a '[' that is not closed"
			}
			members, fact := ranges(letters[from:end])
			if fact != "" {
				return "", fact
			}
			choice.text += "[" + not + members + "]"
			at = end
		case letter == '{':
			open = append(open, &brace{})
		case letter == '}' && len(open) == 1:
			return "", "has a '}' that was not opened"
		case letter == '}' || (letter == ',' && len(open) > 1):
			if choice.text != "" { // An empty choice beside others is none.
				choice.choices = append(choice.choices, choice.text)
			}
			choice.text = ""
			if letter == '}' {
				open = open[:len(open)-1]
				if len(choice.choices) > 0 {
					open[len(open)-1].text += "(?:" + strings.Join(choice.choices, "|") + ")"
				}
			}
		default:
			if letter == '\\' {
				if at++; at == len(letters) {
					return "", "ends in a backslash"
				}
			}
			choice.text += escaped(letters[at])
		}
	}
	if len(open) > 1 {
		return "", "has a '{' that is not closed"
	}
	return open[0].text, ""
}

func ranges(members []rune) (string, string) {
	text := ""
	for at := 0; at < len(members); at++ {
		text += escaped(members[at])
		if at+2 >= len(members) || members[at+1] != '-' {
			continue
		}
		if members[at+2] < members[at] {
			return "", fmt.Sprintf("has the empty range '%c-%c'", members[at], members[at+2])
		}
		text += "-" + escaped(members[at+2])
		at += 2
	}
	return text, ""
}

// What encoding/json forgives and S3 does not: broken UTF-8, half a character, more than 128 levels.
func strict(text []byte) error {
	if !utf8.Valid(text) {
		return errors.New("not UTF-8")
	}
	depth, inString := 0, false
	for at := 0; at < len(text); at++ {
		switch next := text[at]; {
		case inString && next == '\\':
			if high(text, at) && !low(text, at+6) {
				return errors.New("half a character")
			} else if high(text, at) {
				at += 11
			} else if low(text, at) {
				return errors.New("half a character")
			} else {
				at++
			}
		case next == '"':
			inString = !inString
		case inString:
		case next == '{' || next == '[':
			if depth++; depth > depthMax {
				return fmt.Errorf("more than %d levels deep", depthMax)
			}
		case next == '}' || next == ']':
			depth--
		}
	}
	var whole any // Finds numbers beyond a double as well.
	decoder := json.NewDecoder(bytes.NewReader(text))
	if err := decoder.Decode(&whole); err != nil {
		return err
	}
	if _, err := decoder.Token(); err != io.EOF {
		return errors.New("more than one value")
	}
	return nil
}

func high(text []byte, at int) bool { return escape(text, at, "89abAB") }
func low(text []byte, at int) bool  { return escape(text, at, "cdefCDEF") }

func escape(text []byte, at int, third string) bool {
	return at+6 <= len(text) && text[at] == '\\' && text[at+1] == 'u' && (text[at+2]|0x20) == 'd' &&
		strings.IndexByte(third, text[at+3]) >= 0
}
