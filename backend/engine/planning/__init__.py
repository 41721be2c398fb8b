"""Decides which sequences run, how long a pass is, and what is stored, evicted and preempted.

Plain Python without MLX. A module answers each question:

- How many bytes does a sequence, a pass or a cached prefix need? `charges`
- Where do a prompt's first tokens come from? `prefix_source`
- Whose prompts does a step prefill? `prefill_turns`, within what `pace` allows
- How many draft tokens does a step check? `draft_width`
- Whose grammars take too much time? `mask_share`
- When are sequences preempted for texts to embed? `text_turn`

`planner` calls these modules, admits and preempts sequences, and forms batches. Its state is in two
tables, `sequence_table` and `stored_entries`.

When prompts with a common prefix arrive together, the prefix is computed once: the later prompts
wait for its KV and copy it from the running sequence. If more short prompts wait than slots are
free, and another sequence is about to reach its maximum length, free slots stay unused for a few
steps, because the prompts can then share their passes. This happens only if the wait takes less
time than a pass.
"""
