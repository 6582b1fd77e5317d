// A host that runs nothing: it says what the kit decides about the tool that the task names.
import { serve } from '../../../contracts/kits/node/host.mjs';

serve({ id: 'judge', capabilities: {} }, async (run) => {
  await run.event('assistant_message', { text: (await run.may(run.order.task, {})).decision });
});
