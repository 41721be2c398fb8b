"""From the reference in a load request to a model in memory.

A load reads the new model while the current model still serves, and replaces the current model in
its last stage. A load that fails, or whose caller has disconnected, therefore changes nothing, but
for a moment memory must hold both models. A running stream pauses at most for the slowest single
stage, such as one large array or the trial image of a vision model. Work that the first answers do
not need (the token table of grammars, longer warm-up prompts on a GPU) is done afterwards, stage by
stage, once no command has arrived for a second.
"""
