import java.io.ByteArrayOutputStream;
import java.io.File;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.math.BigDecimal;
import java.math.BigInteger;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.ArrayBlockingQueue;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;
import java.util.function.Function;

/**
 * Drives `backplane serve`: orders in, events, asks and one sealed receipt a run out, many runs at once.
 * One file without dependencies, for Java 17 and later. The protocol is in ../sidecar.md; its rules are named S1….
 *
 * JSON is plain values here: Map, List, String, Boolean, null, Long or BigInteger for integers, BigDecimal for others.
 */
public final class Backplane implements AutoCloseable {
    static final int LINE_BYTES_MAX = 16 * 1024 * 1024; // S4
    /** A run that nobody reads holds up the pipe from here on, so memory stays bounded. */
    static final int EVENTS_WAITING_MAX = 1024;
    static final int STDERR_BYTES_MAX = 8192;
    static final int DEPTH_MAX = 128; // S3
    static final int PROBLEMS_MAX = 100;
    static final long HELLO_S_MAX = 10;
    /** A server whose input has ended cancels its runs within this time. */
    static final long CLOSE_S_MAX = 5;

    private static final byte[] GONE = new byte[0];

    private final Process child;
    private final OutputStream stdin;
    private final Map<String, Run> runs = new ConcurrentHashMap<>();
    private final Map<Long, CompletableFuture<Void>> pings = new ConcurrentHashMap<>();
    private final AtomicLong pinged = new AtomicLong();
    private final List<String> problems = new ArrayList<>();
    private final CompletableFuture<Map<String, Object>> hello = new CompletableFuture<>();
    private final CompletableFuture<Void> gone = new CompletableFuture<>();
    private final StringBuffer stderr = new StringBuffer();
    private volatile Failure lost;

    /** What went wrong at the far end, with a code of errors.md. */
    public static final class Failure extends IOException {
        private static final long serialVersionUID = 1;

        public final String code;

        Failure(String code, String text) {
            super(text);
            this.code = code;
        }
    }

    /** How a run ended. */
    public static final class End {
        /** "final" or "fatal". */
        public String t;
        public String error;
        /** `backend_crashed` when the server itself went away. */
        public String errorCode;
        /** Null only when the server went away or could not take the order up. */
        public Map<String, Object> receipt;
        /** The receipt's canonical bytes. */
        public byte[] bytes;
        /** The streamed events' bytes, when the receipt was too long to carry them; else null. */
        public List<byte[]> events;
        public boolean verified;
    }

    /** Start a server and wait for its hello. */
    public static Backplane open(List<String> command, File folder) throws IOException, InterruptedException {
        Backplane made = new Backplane(new ProcessBuilder(command).directory(folder).start());
        try {
            made.hello.get(HELLO_S_MAX, TimeUnit.SECONDS);
            return made;
        } catch (TimeoutException | ExecutionException error) {
            made.child.destroyForcibly();
            throw new Failure("protocol_handshake_failed", "no hello came: " + made.stderr.toString().strip());
        }
    }

    private Backplane(Process child) {
        this.child = child;
        this.stdin = child.getOutputStream();
        daemon("stderr", this::readStderr);
        daemon("stdout", this::readLines);
    }

    private static void daemon(String name, Runnable work) {
        Thread thread = new Thread(work, "backplane " + name);
        thread.setDaemon(true);
        thread.start();
    }

    /** What the server said of itself. */
    public Map<String, Object> hello() {
        return hello.join();
    }

    public long pid() {
        return child.pid();
    }

    /** Errors that named no run, at most 100 of them. */
    public List<String> problems() {
        synchronized (problems) {
            return List.copyOf(problems);
        }
    }

    /** Send an order. With onAsk the caller answers what the policy leaves open, on a thread of its own:
     * from an ask's members to an answer's (`decision`, and where wanted `reason`, `input`, `text`, `remember`). */
    public Run submit(Map<String, Object> order, Function<Map<String, Object>, Map<String, Object>> onAsk)
            throws IOException {
        if (lost != null) throw lost;
        Run run = new Run(UUID.randomUUID().toString(), onAsk);
        List<Object> extensions = new ArrayList<>(List.of("cancel/1", "ping/1", "many/1", "stage/1"));
        if (onAsk != null) extensions.add("ask/1");
        runs.put(run.id, run);
        send(message("t", "run", "id", run.id, "work_order", order, "extensions", extensions));
        if (lost != null) run.finish(lostEnd());
        return run;
    }

    /** Completes when the server answers. */
    public CompletableFuture<Void> ping() {
        long seq = pinged.incrementAndGet();
        CompletableFuture<Void> answered = new CompletableFuture<>();
        pings.put(seq, answered);
        send(message("t", "ping", "seq", seq));
        if (lost != null) answered.completeExceptionally(lost);
        return answered;
    }

    /** Let go of the server: runs that are open are cancelled by it, and it has ended on return. */
    @Override
    public void close() {
        runs.values().forEach(Run::letGo);
        closeInput();
        try {
            child.waitFor(CLOSE_S_MAX, TimeUnit.SECONDS);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
        child.destroyForcibly();
        gone.join();
    }

    private void closeInput() {
        synchronized (stdin) {
            try {
                stdin.close();
            } catch (IOException error) {
                // A server that is gone is told by its exit.
            }
        }
    }

    /** One order under way: call next until it gives null, then end. */
    public final class Run {
        public final String id;
        private final Function<Map<String, Object>, Map<String, Object>> onAsk;
        private final BlockingQueue<byte[]> waiting = new ArrayBlockingQueue<>(EVENTS_WAITING_MAX);
        private final List<byte[]> kept = new ArrayList<>(); // A receipt too long for a line is verified with these.
        private final CompletableFuture<End> ended = new CompletableFuture<>();
        private volatile boolean unread;

        private Run(String id, Function<Map<String, Object>, Map<String, Object>> onAsk) {
            this.id = id;
            this.onAsk = onAsk;
        }

        /** The next event in the server's own bytes (see parse); null when there are no more. */
        public byte[] next() throws InterruptedException {
            byte[] event = waiting.poll();
            while (event == null && !ended.isDone()) event = waiting.poll(1, TimeUnit.SECONDS);
            // What came last may have come between the two looks.
            if (event == null) event = waiting.poll();
            return event == GONE ? null : event;
        }

        /** Ask the server to end the run within the grace; go on with next and end. */
        public void cancel(String reason, long graceMs) {
            send(message("t", "cancel", "ref_id", id, "reason", reason, "grace_ms", graceMs));
        }

        /** Wait for the run's end. Events that were not read are let go. */
        public End end() {
            letGo();
            return ended.join();
        }

        private void letGo() {
            unread = true;
            waiting.clear();
        }

        private void hand(byte[] event) {
            try {
                while (!unread && !waiting.offer(event, 1, TimeUnit.SECONDS)) continue;
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
        }

        private void ask(Map<String, Object> ask) {
            Map<String, Object> said = message("t", "answer", "ref_id", id, "id", ask.get("id"));
            try {
                said.putAll(onAsk.apply(ask));
            } catch (RuntimeException error) {
                // A fault in the caller's code lets no tool through.
                said.putAll(message("decision", "deny", "reason", String.valueOf(error)));
            }
            send(said);
        }

        private void finish(End end) {
            // Wakes whoever waits; where the queue is full nobody does.
            if (ended.complete(end)) waiting.offer(GONE);
        }
    }

    private End lostEnd() {
        End end = new End();
        end.t = "fatal";
        end.error = lost.getMessage();
        end.errorCode = lost.code;
        return end;
    }

    private void readStderr() {
        byte[] data = new byte[4096];
        try (InputStream from = child.getErrorStream()) {
            for (int size; (size = from.read(data)) >= 0; ) {
                stderr.append(new String(data, 0, size, StandardCharsets.UTF_8));
                if (stderr.length() > STDERR_BYTES_MAX) stderr.delete(0, stderr.length() - STDERR_BYTES_MAX);
            }
        } catch (IOException error) {
            // Its end, however it comes, is no news.
        }
    }

    private void readLines() {
        Failure failure = null;
        ByteArrayOutputStream line = new ByteArrayOutputStream();
        byte[] data = new byte[65536];
        try (InputStream from = child.getInputStream()) {
            for (int size; (size = from.read(data)) >= 0; ) {
                int start = 0;
                for (int at = 0; at < size; at++) {
                    if (data[at] != '\n') continue;
                    line.write(data, start, at - start);
                    take(line.toByteArray());
                    line.reset();
                    start = at + 1;
                }
                line.write(data, start, size - start);
                if (line.size() > LINE_BYTES_MAX) {
                    throw new Failure("protocol_invalid_envelope", "a line is over " + LINE_BYTES_MAX + " bytes");
                }
            }
            if (line.size() > 0) take(line.toByteArray()); // A last line without its newline counts, where it is whole.
        } catch (Failure error) {
            failure = error;
        } catch (IOException error) {
            // The pipe is gone with the server.
        }
        if (failure != null) child.destroyForcibly();
        int code = child.onExit().join().exitValue();
        lost = failure != null ? failure
            : new Failure("backend_crashed", "the server ended with exit code " + code + "; " + stderr.toString().strip());
        hello.completeExceptionally(lost);
        pings.values().forEach(answered -> answered.completeExceptionally(lost));
        runs.values().forEach(run -> run.finish(lostEnd()));
        gone.complete(null);
    }

    private void take(byte[] line) {
        Map<String, Object> said;
        try {
            if (!(parse(line) instanceof Map<?, ?> object && object.get("t") instanceof String)) return;
            said = castObject(object);
        } catch (IllegalArgumentException error) {
            return; // S2: noise
        }
        Run run = said.get("ref_id") instanceof String id ? runs.get(id) : null;
        switch ((String) said.get("t")) {
            case "hello" -> hello.complete(said);
            case "pong" -> {
                CompletableFuture<Void> answered = said.get("seq") instanceof Long seq ? pings.remove(seq) : null;
                if (answered != null) answered.complete(null);
            }
            case "event" -> {
                if (run == null) return;
                byte[] event = lastMember(line, "event");
                run.kept.add(event);
                run.hand(event);
            }
            case "ask" -> {
                if (run != null && run.onAsk != null) daemon("ask", () -> run.ask(said));
            }
            case "final", "fatal" -> {
                if (run != null) {
                    runs.remove(run.id);
                    run.finish(end(said, line, run.kept));
                } else if (said.get("error") instanceof String error) {
                    synchronized (problems) {
                        if (problems.size() < PROBLEMS_MAX) problems.add(error);
                    }
                }
            }
            default -> { } // S6
        }
    }

    private static End end(Map<String, Object> said, byte[] line, List<byte[]> kept) {
        End end = new End();
        end.t = (String) said.get("t");
        end.error = said.get("error") instanceof String text ? text : null;
        end.errorCode = said.get("error_code") instanceof String code ? code : null;
        if (said.get("receipt") instanceof Map<?, ?> receipt) {
            end.receipt = castObject(receipt);
            end.bytes = lastMember(line, "receipt");
            end.events = "as_streamed".equals(said.get("trace")) ? kept : null;
            end.verified = verify(end.bytes, end.events);
        }
        return end;
    }

    private void send(Map<String, Object> message) {
        byte[] line = (write(message) + "\n").getBytes(StandardCharsets.UTF_8);
        synchronized (stdin) {
            try {
                stdin.write(line);
                stdin.flush();
            } catch (IOException error) {
                // A server that is gone is told by its exit.
            }
        }
    }

    private static Map<String, Object> message(Object... members) {
        Map<String, Object> made = new LinkedHashMap<>();
        for (int at = 0; at < members.length; at += 2) made.put((String) members[at], members[at + 1]);
        return made;
    }

    // Quotes inside a string are escaped, so the first `,"name":` is the member itself; it is the last one.
    private static byte[] lastMember(byte[] line, String name) {
        String mark = ",\"" + name + "\":";
        int end = line.length;
        while (line[end - 1] != '}') end--;
        return Arrays.copyOfRange(line, indexOf(line, mark, 0) + mark.length(), end - 1);
    }

    private static int indexOf(byte[] bytes, String ascii, int from) {
        byte[] wanted = ascii.getBytes(StandardCharsets.US_ASCII);
        for (int at = from; at <= bytes.length - wanted.length; at++) {
            if (bytes[at] == wanted[0] && Arrays.equals(bytes, at, at + wanted.length, wanted, 0, wanted.length)) return at;
        }
        return -1;
    }

    /**
     * Whether a receipt's canonical bytes have the hash they name.
     *
     * @param events the bytes of the streamed events where the run's end said that the trace is as streamed, else null
     */
    public static boolean verify(byte[] receipt, List<byte[]> events) {
        String mark = "\"receipt_sha256\":";
        int from = indexOf(receipt, mark, 0) + mark.length();
        if (from < mark.length() || receipt.length < from + 66 || receipt[from] != '"' || receipt[from + 65] != '"') {
            return false;
        }
        int rest = from + 66;
        MessageDigest hash;
        try {
            hash = MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException error) {
            throw new IllegalStateException("every Java has SHA-256", error);
        }
        hash.update(receipt, 0, from);
        hash.update("null".getBytes(StandardCharsets.US_ASCII));
        if (events != null) {
            int trace = indexOf(receipt, "\"trace\":[]", rest);
            if (trace < 0) return false;
            int open = trace + "\"trace\":[".length();
            hash.update(receipt, rest, open - rest);
            for (int number = 0; number < events.size(); number++) {
                if (number > 0) hash.update((byte) ',');
                hash.update(events.get(number));
            }
            rest = open;
        }
        hash.update(receipt, rest, receipt.length - rest);
        return HexFormat.of().formatHex(hash.digest()).equals(new String(receipt, from + 1, 64, StandardCharsets.US_ASCII));
    }

    /**
     * Read JSON text in UTF-8 as plain values.
     *
     * @throws IllegalArgumentException when it is not strict JSON
     */
    public static Object parse(byte[] json) {
        return new Reader(new String(json, StandardCharsets.UTF_8)).whole();
    }

    @SuppressWarnings("unchecked") // A reader makes no other keys than strings.
    private static Map<String, Object> castObject(Map<?, ?> object) {
        return (Map<String, Object>) object;
    }

    private static final class Reader {
        private final String text;
        private int at;

        Reader(String text) {
            this.text = text;
        }

        Object whole() {
            Object value = value(0);
            skip();
            if (at < text.length()) throw wrong();
            return value;
        }

        private IllegalArgumentException wrong() {
            return new IllegalArgumentException("not strict JSON at character " + at);
        }

        private void skip() {
            while (at < text.length() && " \t\r\n".indexOf(text.charAt(at)) >= 0) at++;
        }

        private char peek() {
            if (at >= text.length()) throw wrong();
            return text.charAt(at);
        }

        private boolean took(char wanted) {
            skip();
            if (peek() != wanted) return false;
            at++;
            return true;
        }

        private Object value(int depth) {
            if (took('{')) return object(depth + 1);
            if (took('[')) return array(depth + 1);
            if (took('"')) return string();
            if (word("true")) return true;
            if (word("false")) return false;
            return word("null") ? null : number();
        }

        private boolean word(String wanted) {
            if (!text.startsWith(wanted, at)) return false;
            at += wanted.length();
            return true;
        }

        private Map<String, Object> object(int depth) {
            if (depth > DEPTH_MAX) throw wrong();
            Map<String, Object> made = new LinkedHashMap<>();
            if (took('}')) return made;
            do {
                if (!took('"')) throw wrong();
                String name = string();
                if (!took(':')) throw wrong();
                made.put(name, value(depth));
            } while (took(','));
            if (!took('}')) throw wrong();
            return made;
        }

        private List<Object> array(int depth) {
            if (depth > DEPTH_MAX) throw wrong();
            List<Object> made = new ArrayList<>();
            if (took(']')) return made;
            do {
                made.add(value(depth));
            } while (took(','));
            if (!took(']')) throw wrong();
            return made;
        }

        private String string() {
            StringBuilder made = new StringBuilder();
            for (int from = at; ; at++) {
                char next = peek();
                if (next < 0x20) throw wrong();
                if (next != '"' && next != '\\') continue;
                made.append(text, from, at++);
                if (next == '"') return made.toString();
                made.append(escaped());
                from = at--;
            }
        }

        private char escaped() {
            int which = "\"\\/bfnrtu".indexOf(peek());
            at++;
            if (which < 0) throw wrong();
            if (which < 8) return "\"\\/\b\f\n\r\t".charAt(which);
            if (at + 4 > text.length()) throw wrong();
            at += 4;
            return (char) HexFormat.fromHexDigits(text, at - 4, at);
        }

        private Object number() {
            int from = at;
            while (at < text.length() && "+-.eE0123456789".indexOf(text.charAt(at)) >= 0) at++;
            String digits = text.substring(from, at);
            if (!digits.matches("-?(0|[1-9][0-9]*)(\\.[0-9]+)?([eE][-+]?[0-9]+)?")) throw wrong();
            if (digits.matches(".*[.eE].*")) return new BigDecimal(digits);
            BigInteger whole = new BigInteger(digits);
            return whole.bitLength() < 64 ? (Object) whole.longValue() : whole;
        }
    }

    /** Write plain values as JSON text on one line. */
    public static String write(Object value) {
        StringBuilder into = new StringBuilder();
        write(value, into);
        return into.toString();
    }

    private static void write(Object value, StringBuilder into) {
        if (value instanceof Map<?, ?> object) {
            String between = "{";
            for (Map.Entry<?, ?> member : object.entrySet()) {
                write(String.valueOf(member.getKey()), into.append(between));
                write(member.getValue(), into.append(':'));
                between = ",";
            }
            into.append(object.isEmpty() ? "{}" : "}");
        } else if (value instanceof Iterable<?> items) {
            into.append('[');
            String between = "";
            for (Object item : items) {
                write(item, into.append(between));
                between = ",";
            }
            into.append(']');
        } else if (value instanceof CharSequence text) {
            writeString(text, into.append('"'));
            into.append('"');
        } else {
            into.append(value);
        }
    }

    private static void writeString(CharSequence text, StringBuilder into) {
        for (int at = 0; at < text.length(); at++) {
            char next = text.charAt(at);
            if (next == '"' || next == '\\') into.append('\\').append(next);
            else if (next < 0x20) into.append(String.format("\\u%04x", (int) next));
            else into.append(next);
        }
    }
}
