import java.io.File;
import java.util.List;
import java.util.Map;

/** One order from Java, its questions answered here. Usage: Client TASK FOLDER; beside contracts/clients/Backplane.java. */
public final class Client {
    public static void main(String[] words) throws Exception {
        try (Backplane plane = Backplane.open(List.of("backplane", "serve"), new File("."))) {
            Map<String, Object> order = Map.of("task", words[0], "workspace", Map.of("root", words[1]));
            Backplane.Run run = plane.submit(order, ask -> Map.of("decision", "deny", "reason", "a person decides"));
            for (byte[] raw; (raw = run.next()) != null; ) {
                Map<?, ?> event = (Map<?, ?>) Backplane.parse(raw);
                if ("assistant_message".equals(event.get("type"))) System.out.println(event.get("text"));
            }
            Backplane.End end = run.end();
            Object outcome = ((Map<?, ?>) end.receipt).get("outcome");
            System.out.println(outcome + (end.verified ? " verified" : " NOT VERIFIED"));
        }
    }
}
