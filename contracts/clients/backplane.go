// Package backplane drives `backplane serve`: orders in, events, asks and one sealed receipt a run out,
// many runs at once. One file, standard library only: copy it into a module of yours.
// The protocol is in ../sidecar.md; its rules are named S1….
package backplane

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"time"
)

const (
	lineBytesMax     = 16 << 20 // S4
	eventsWaitingMax = 1024     // A run that nobody reads holds up the pipe from here on: memory stays bounded.
	stderrBytesMax   = 8192
	helloMax         = 10 * time.Second
	closeMax         = 5 * time.Second // A server whose input has ended cancels its runs within this time.
	problemsMax      = 100
)

// Options say how the server is started; the zero value is `backplane serve` here and now.
type Options struct {
	Command []string
	Dir     string
	Env     []string
}

// Ask is what a host wants to know before it acts. Raw has the members of its kind.
type Ask struct {
	ID       string          `json:"id"`
	Kind     string          `json:"kind"`
	Name     string          `json:"name"`
	Input    json.RawMessage `json:"input"`
	Question string          `json:"question"`
	Raw      json.RawMessage `json:"-"`
}

// Answer decides an ask: "allow", "deny", or "modify" with the Input (or Text) to use instead.
type Answer struct {
	Decision string          `json:"decision"`
	Reason   string          `json:"reason,omitempty"`
	Input    json.RawMessage `json:"input,omitempty"`
	Text     string          `json:"text,omitempty"`
	Remember string          `json:"remember,omitempty"`
}

// End is how a run ended. Receipt has the canonical bytes; it is empty only when the server went away
// (code backend_crashed) or could not take the order up.
type End struct {
	Final     bool
	Error     string
	ErrorCode string
	Receipt   json.RawMessage
	// Events are the streamed events' bytes, set when the receipt was too long to carry them.
	Events   []json.RawMessage
	Verified bool
}

// Client is one server. Its methods may be called from any goroutine.
type Client struct {
	Hello json.RawMessage

	child    *exec.Cmd
	stdin    io.WriteCloser
	writing  sync.Mutex
	mutex    sync.Mutex
	runs     map[string]*Run
	pings    map[uint64]chan struct{}
	seq      uint64
	problems []string
	lost     *End
	greeted  chan struct{}
	gone     chan struct{}
	stderr   tail
}

// Open starts a server and waits for its hello.
func Open(ctx context.Context, options Options) (*Client, error) {
	command := options.Command
	if len(command) == 0 {
		command = []string{"backplane", "serve"}
	}
	client := &Client{runs: map[string]*Run{}, pings: map[uint64]chan struct{}{},
		greeted: make(chan struct{}), gone: make(chan struct{})}
	client.child = exec.Command(command[0], command[1:]...)
	client.child.Dir, client.child.Env, client.child.Stderr = options.Dir, options.Env, &client.stderr
	stdin, err := client.child.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := client.child.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := client.child.Start(); err != nil {
		return nil, err
	}
	client.stdin = stdin
	go client.read(stdout)
	ctx, cancel := context.WithTimeout(ctx, helloMax)
	defer cancel()
	select {
	case <-client.greeted:
		return client, nil
	case <-client.gone:
		return nil, errors.New(client.lost.Error)
	case <-ctx.Done():
		client.child.Process.Kill()
		<-client.gone
		return nil, fmt.Errorf("no hello: %w", ctx.Err())
	}
}

// PID is the server's process.
func (c *Client) PID() int { return c.child.Process.Pid }

// Problems are errors that named no run, at most 100 of them.
func (c *Client) Problems() []string {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return append([]string(nil), c.problems...)
}

// Submit sends an order, which may be any value that encodes to JSON, or a json.RawMessage.
// With onAsk the caller answers what the policy leaves open; it is called on a goroutine of its own.
func (c *Client) Submit(order any, onAsk func(Ask) Answer) (*Run, error) {
	extensions := []string{"cancel/1", "ping/1", "many/1", "stage/1"}
	if onAsk != nil {
		extensions = append(extensions, "ask/1")
	}
	run := &Run{ID: newID(), client: c, onAsk: onAsk,
		events: make(chan json.RawMessage, eventsWaitingMax), over: make(chan struct{}), unread: make(chan struct{})}
	line, err := encode(map[string]any{"t": "run", "id": run.ID, "work_order": order, "extensions": extensions})
	if err != nil {
		return nil, err
	}
	c.mutex.Lock()
	lost := c.lost
	if lost == nil {
		c.runs[run.ID] = run
	}
	c.mutex.Unlock()
	if lost != nil {
		return nil, errors.New(lost.Error)
	}
	c.write(line)
	return run, nil
}

// Ping returns when the server has answered.
func (c *Client) Ping(ctx context.Context) error {
	c.mutex.Lock()
	c.seq++
	seq, answered := c.seq, make(chan struct{})
	c.pings[seq] = answered
	c.mutex.Unlock()
	c.send(map[string]any{"t": "ping", "seq": seq})
	select {
	case <-answered:
		return nil
	case <-c.gone:
		return errors.New(c.lost.Error)
	case <-ctx.Done():
		c.mutex.Lock()
		delete(c.pings, seq)
		c.mutex.Unlock()
		return ctx.Err()
	}
}

// Close lets go of the server: runs that are open are cancelled by it, and it has ended on return.
func (c *Client) Close() error {
	c.mutex.Lock()
	for _, run := range c.runs {
		run.letGo()
	}
	c.mutex.Unlock()
	c.stdin.Close()
	select {
	case <-c.gone:
	case <-time.After(closeMax):
		c.child.Process.Kill()
		<-c.gone
	}
	return nil
}

// Run is one order under way: call Next until it says false, then End.
type Run struct {
	ID     string
	client *Client
	onAsk  func(Ask) Answer
	events chan json.RawMessage
	kept   []json.RawMessage // A receipt too long for a line is verified with these.
	unread chan struct{}
	once   sync.Once
	over   chan struct{}
	end    End
}

// Next gives the next event in the server's own bytes; false when there are no more.
func (r *Run) Next() (json.RawMessage, bool) {
	event, more := <-r.events
	return event, more
}

// Cancel asks the server to end the run within the grace; go on with Next and End.
func (r *Run) Cancel(reason string, grace time.Duration) {
	r.client.send(map[string]any{"t": "cancel", "ref_id": r.ID, "reason": reason, "grace_ms": grace.Milliseconds()})
}

// End waits for the run's end. Events that were not read are let go.
func (r *Run) End() End {
	r.letGo()
	<-r.over
	return r.end
}

func (r *Run) letGo() { r.once.Do(func() { close(r.unread) }) }

func (r *Run) hand(event json.RawMessage) {
	r.kept = append(r.kept, event)
	select {
	case r.events <- event:
	case <-r.unread:
	}
}

func (r *Run) finish(end End) {
	r.end = end
	close(r.events)
	close(r.over)
}

func (r *Run) ask(ask Ask) {
	answer := r.onAsk(ask)
	r.client.send(struct {
		T     string `json:"t"`
		RefID string `json:"ref_id"`
		ID    string `json:"id"`
		Answer
	}{"answer", r.ID, ask.ID, answer})
}

// What the server says. RawMessage keeps a member's bytes as they came, so that hashes can be checked.
type message struct {
	T         string          `json:"t"`
	RefID     *string         `json:"ref_id"`
	Event     json.RawMessage `json:"event"`
	Receipt   json.RawMessage `json:"receipt"`
	Trace     string          `json:"trace"`
	Error     string          `json:"error"`
	ErrorCode string          `json:"error_code"`
	Seq       uint64          `json:"seq"`
}

func (c *Client) read(stdout io.Reader) {
	reader := bufio.NewReaderSize(stdout, 64<<10)
	for {
		line, err := readLine(reader)
		if err == nil {
			c.take(line)
			continue
		}
		code := "backend_crashed"
		if err != io.EOF {
			code = "protocol_invalid_envelope"
			c.child.Process.Kill()
		}
		how := c.child.Wait()
		c.lose(code, fmt.Sprintf("the server ended (%v, %v); %s", err, how, c.stderr.text()))
		return
	}
}

func readLine(reader *bufio.Reader) ([]byte, error) {
	var line []byte
	for {
		piece, err := reader.ReadSlice('\n')
		line = append(line, piece...)
		if len(line) > lineBytesMax+1 {
			return nil, fmt.Errorf("a line is over %d bytes", lineBytesMax)
		}
		if err == nil || (err == io.EOF && len(line) > 0) {
			return line, nil
		}
		if err != bufio.ErrBufferFull {
			return nil, io.EOF
		}
	}
}

func (c *Client) take(line []byte) {
	var said message
	if json.Unmarshal(line, &said) != nil {
		return // S2: noise
	}
	var run *Run
	c.mutex.Lock()
	if said.RefID != nil {
		run = c.runs[*said.RefID]
	}
	if run != nil && (said.T == "final" || said.T == "fatal") {
		delete(c.runs, run.ID)
	}
	c.mutex.Unlock()
	switch {
	case said.T == "hello" && c.Hello == nil:
		c.Hello = line
		close(c.greeted)
	case said.T == "pong":
		c.mutex.Lock()
		if answered := c.pings[said.Seq]; answered != nil {
			close(answered)
			delete(c.pings, said.Seq)
		}
		c.mutex.Unlock()
	case run == nil && said.T == "fatal":
		c.mutex.Lock()
		if len(c.problems) < problemsMax {
			c.problems = append(c.problems, said.Error)
		}
		c.mutex.Unlock()
	case run == nil:
	case said.T == "event":
		run.hand(said.Event)
	case said.T == "ask" && run.onAsk != nil:
		ask := Ask{Raw: line}
		if json.Unmarshal(line, &ask) == nil {
			go run.ask(ask)
		}
	case said.T == "final" || said.T == "fatal":
		end := End{Final: said.T == "final", Error: said.Error, ErrorCode: said.ErrorCode, Receipt: said.Receipt}
		if said.Trace == "as_streamed" {
			end.Events = run.kept
		}
		end.Verified = Verify(end.Receipt, end.Events)
		run.finish(end)
	}
}

func (c *Client) lose(code, text string) {
	c.mutex.Lock()
	c.lost = &End{Error: text, ErrorCode: code}
	runs := c.runs
	c.runs = map[string]*Run{}
	c.mutex.Unlock()
	for _, run := range runs {
		run.finish(*c.lost)
	}
	close(c.gone)
}

func (c *Client) send(message any) {
	// What is sent here is made of strings and numbers, or of the caller's own JSON, which may be none.
	if line, err := encode(message); err == nil {
		c.write(line)
	}
}

func (c *Client) write(line []byte) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.stdin.Write(line) // A server that is gone is told by its exit.
}

func encode(message any) ([]byte, error) {
	var line bytes.Buffer
	encoder := json.NewEncoder(&line)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(message)
	return line.Bytes(), err
}

func newID() string {
	var id [16]byte
	rand.Read(id[:])
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// Verify tells whether a receipt's canonical bytes have the hash they name. The events are the streamed ones
// where the run's end said that the trace is as streamed, else nil.
func Verify(receipt []byte, events []json.RawMessage) bool {
	mark := []byte(`"receipt_sha256":`)
	from := bytes.Index(receipt, mark) + len(mark)
	if from < len(mark) || len(receipt) < from+66 || receipt[from] != '"' || receipt[from+65] != '"' {
		return false
	}
	named, rest := receipt[from+1:from+65], receipt[from+66:]
	hash := sha256.New()
	hash.Write(receipt[:from])
	hash.Write([]byte("null"))
	if events != nil {
		trace := bytes.Index(rest, []byte(`"trace":[]`))
		if trace < 0 {
			return false
		}
		open := trace + len(`"trace":[`)
		hash.Write(rest[:open])
		for number, event := range events {
			if number > 0 {
				hash.Write([]byte(","))
			}
			hash.Write(event)
		}
		rest = rest[open:]
	}
	hash.Write(rest)
	return hex.EncodeToString(hash.Sum(nil)) == string(named)
}

// tail keeps the end of what the server says to people.
type tail struct {
	mutex sync.Mutex
	kept  []byte
}

func (t *tail) Write(data []byte) (int, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.kept = append(t.kept, data...)
	if over := len(t.kept) - stderrBytesMax; over > 0 {
		t.kept = t.kept[over:]
	}
	return len(data), nil
}

func (t *tail) text() string {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return strings.TrimSpace(string(t.kept))
}
