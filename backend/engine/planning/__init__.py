"""What decides: who runs, how long a pass is, what is stored, evicted and preempted.

Plain Python without MLX. Each question has a module of its own:

- How many bytes does this take? `charges`
- Where do a prompt's first tokens come from? `prefix_source`
- Whose prompts does a step prefill? `prefill_turns`, within what `pace` allows
- How many draft tokens does a step check? `guess_width`
- Whose grammars take too much time? `mask_share`
- When are sequences preempted for texts to embed? `text_turn`

`planner` asks them, admits and preempts sequences and forms batches. Its state is in two tables,
`sequence_table` and `stored_entries`.

When prompts with a common prefix arrive together, the prefix is computed once: the later prompts
wait for it and copy it from the running sequence. While more short prompts wait than slots are
free, a free slot stays free for a few steps if another sequence is about to reach its maximum
length and the wait costs less than a pass, because the prompts then share their passes.
"""
