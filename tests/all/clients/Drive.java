import java.io.File;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** Plays the cases of a file through the Java client and says in one line of JSON how each went. */
public final class Drive {
    public static void main(String[] words) throws Exception {
        Map<?, ?> plan = (Map<?, ?>) Backplane.parse(Files.readAllBytes(Path.of(words[0])));
        List<String> command = ((List<?>) plan.get("command")).stream().map(String::valueOf).toList();
        try (Backplane client = Backplane.open(command, new File("."))) {
            client.ping().get(10, TimeUnit.SECONDS);
            for (Object one : (List<?>) plan.get("cases")) {
                Map<String, Object> record = new LinkedHashMap<>(Map.of("cell", member(one, "cell")));
                if (member(one, "times") == null) play(client, one, record);
                else playMany(client, one, record);
                say(record);
            }
        }
    }

    private static void say(Map<String, Object> record) {
        byte[] line = (Backplane.write(record) + "\n").getBytes(StandardCharsets.UTF_8);
        System.out.write(line, 0, line.length);
        System.out.flush();
    }

    private static Object member(Object object, String... path) {
        for (String name : path) object = object == null ? null : ((Map<?, ?>) object).get(name);
        return object;
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> object(Object value) {
        return (Map<String, Object>) value;
    }

    private static byte[] oneDigitChanged(byte[] receipt) {
        byte[] changed = receipt.clone();
        String mark = "\"duration_ms\":";
        int at = new String(receipt, StandardCharsets.ISO_8859_1).indexOf(mark) + mark.length();
        changed[at] = (byte) ('1' + (changed[at] - '0') % 9);
        return changed;
    }

    private static void play(Backplane client, Object one, Map<String, Object> record) throws Exception {
        List<Object> asks = new ArrayList<>();
        List<Object> types = new ArrayList<>();
        int toolErrors = 0;
        int textBytes = 0;
        MessageDigest hash = MessageDigest.getInstance("SHA-256");
        Object answer = member(one, "answer");
        Backplane.Run run = client.submit(object(member(one, "order")), answer == null ? null : ask -> {
            asks.add(ask.get("name"));
            return object(answer);
        });
        for (byte[] raw; (raw = run.next()) != null; ) {
            Object event = Backplane.parse(raw);
            Object type = member(event, "type");
            if (!type.equals("warning")) types.add(type);
            if (Boolean.TRUE.equals(member(event, "is_error"))) toolErrors++;
            if (!type.equals("assistant_message")) continue;
            byte[] text = ((String) member(event, "text")).getBytes(StandardCharsets.UTF_8);
            hash.update(text);
            textBytes += text.length;
            switch (String.valueOf(member(one, "when"))) {
                case "cancel" -> run.cancel("the user changed his mind", 2000);
                case "kill the server" -> ProcessHandle.of(client.pid()).ifPresent(ProcessHandle::destroyForcibly);
                case "wait" -> say(Map.of("cell", record.get("cell"), "ready", true));
                default -> { }
            }
        }
        Backplane.End end = run.end();
        record.put("types", types);
        record.put("text_bytes", textBytes);
        record.put("text_sha256", HexFormat.of().formatHex(hash.digest()));
        record.put("tool_errors", toolErrors);
        record.put("asks", asks);
        record.put("end", end.t);
        record.put("code", end.errorCode);
        record.put("outcome", member(end.receipt, "outcome"));
        record.put("reason", member(end.receipt, "usage_raw", "backplane", "end", "reason"));
        record.put("as_streamed", end.events != null);
        record.put("verified", end.verified);
        boolean change = Boolean.TRUE.equals(member(one, "change"));
        record.put("changed_verifies", change ? Backplane.verify(oneDigitChanged(end.bytes), end.events) : null);
    }

    private static void playMany(Backplane client, Object one, Map<String, Object> record) throws Exception {
        List<Backplane.Run> runs = new ArrayList<>();
        Map<String, Object> order = object(member(one, "order"));
        int times = ((Long) member(one, "times")).intValue();
        for (int number = 0; number < times; number++) {
            Map<String, Object> mine = new LinkedHashMap<>(order);
            mine.put("task", order.get("task") + " " + number);
            runs.add(client.submit(mine, null));
        }
        int finals = 0;
        int verified = 0;
        int own = 0;
        for (int number = 0; number < times; number++) {
            StringBuilder text = new StringBuilder();
            for (byte[] raw; (raw = runs.get(number).next()) != null; ) {
                Object event = Backplane.parse(raw);
                if (member(event, "type").equals("assistant_message")) text.append(member(event, "text"));
            }
            Backplane.End end = runs.get(number).end();
            if (end.t.equals("final")) finals++;
            if (end.verified) verified++;
            if (text.toString().equals(order.get("task") + " " + number)) own++;
        }
        record.putAll(Map.of("runs", times, "finals", finals, "verified", verified, "own", own));
    }
}
