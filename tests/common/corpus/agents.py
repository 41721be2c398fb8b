"""Calls as users of agents report them, in the words of this project."""

from __future__ import annotations

from tests.common.corpus import Case, tool

TOOLS = [
    tool("read_file", path="string", limit="integer"),
    tool("bash", command="string", timeout="integer", background="boolean"),
    tool("edit", path="string", old="string", new="string"),
    tool("todo", items={"type": "array", "items": {"type": "object"}}),
    tool("get_time"),
    tool("search", query="string", paths={"type": "array"}, opts="object"),
]

AGENTS: dict[tuple[str, str | None, str], list[Case]] = {
    ("qwen3_coder", "qwen3", "<|im_start|>assistant\n"): [
        Case(
            "a number in quotes",
            '<tool_call>\n<function=read_file>\n<parameter=path>\n"a"\n</parameter>\n'
            '<parameter=limit>\n"10"\n</parameter>\n</function>\n</tool_call>',
            calls=[("read_file", {"path": '"a"', "limit": 10})],
            tools=TOOLS,
        ),
        Case(
            "another turn after a call",
            "<tool_call>\n<function=get_time>\n</function>\n</tool_call><|im_end|>\n"
            "<|im_start|>assistant\nDone.",
            "Done.",
            calls=[("get_time", {})],
            tools=TOOLS,
        ),
        Case(
            "no opening tag",
            (
                "I'll look.\n\n<function=read_file>\n<parameter=path>\nsrc/a.py\n"
                "</parameter>\n</function>\n</tool_call>"
            ),
            "I'll look.",
            calls=[("read_file", {"path": "src/a.py"})],
            tools=TOOLS,
        ),
        Case(
            "tags in heredoc",
            (
                "<tool_call>\n<function=bash>\n<parameter=command>\ncat <<'EOF' > a.xml\n"
                "<tool_call>\n<x/>\n</tool_call>\nEOF\n</parameter>\n<parameter=timeout>\n30\n"
                "</parameter>\n</function>\n</tool_call>"
            ),
            calls=[
                (
                    "bash",
                    {
                        "command": "cat <<'EOF' > a.xml\n<tool_call>\n<x/>\n</tool_call>\nEOF",
                        "timeout": 30,
                    },
                )
            ],
            tools=TOOLS,
        ),
        Case(
            "double close",
            (
                "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
                "</function>\n</tool_call>\n</tool_call>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "trailing comma in JSON",
            (
                "<tool_call>\n<function=todo>\n<parameter=items>\n"
                '[{"text": "a <b>", "done": false},]\n</parameter>\n</function>\n</tool_call>'
            ),
            calls=[("todo", {"items": [{"text": "a <b>", "done": False}]})],
            tools=TOOLS,
        ),
        Case(
            "python literal",
            (
                "<tool_call>\n<function=todo>\n<parameter=items>\n"
                "[{'text': 'a', 'done': True}]\n</parameter>\n</function>\n</tool_call>"
            ),
            calls=[("todo", {"items": [{"text": "a", "done": True}]})],
            tools=TOOLS,
        ),
        Case(
            "values on the lines of their tags",
            (
                "<tool_call>\n<function=read_file>\n<parameter=path>src/a.py</parameter>\n"
                "<parameter=limit>100</parameter>\n</function>\n</tool_call>"
            ),
            calls=[("read_file", {"path": "src/a.py", "limit": 100})],
            tools=TOOLS,
        ),
        Case(
            "closing with the key",
            (
                "<tool_call>\n<function=read_file>\n<parameter=path>\nsrc/a.py\n</path>\n"
                "</function>\n</tool_call>"
            ),
            calls=[("read_file", {"path": "src/a.py"})],
            tools=TOOLS,
        ),
        Case(
            "empty and blank lines",
            (
                "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>\n"
                "<parameter=old>\n</parameter>\n<parameter=new>\n\n  x\n\n</parameter>\n"
                "</function>\n</tool_call>"
            ),
            calls=[("edit", {"path": "a", "old": "", "new": "\n  x\n"})],
            tools=TOOLS,
        ),
        Case(
            "JSON from a coder",
            '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "an object in the function's tag",
            '<tool_call>\n<function=bash>\n{"command": "ls"}\n</function>\n</tool_call>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "quoted names",
            (
                '<tool_call>\n<function="bash">\n<parameter="command">\nls\n</parameter>\n'
                "</function>\n</tool_call>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "cline style",
            "<tool_call>\n<bash>\n<command>ls -la</command>\n</bash>\n</tool_call>",
            calls=[("bash", {"command": "ls -la"})],
            tools=TOOLS,
        ),
        Case(
            "no function tag",
            "<tool_call>bash\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "first block not closed",
            (
                "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
                "</function>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"
            ),
            calls=[("bash", {"command": "ls"}), ("get_time", {})],
            tools=TOOLS,
        ),
        Case(
            "two in a block",
            (
                "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n"
                "</function>\n<function=get_time>\n</function>\n</tool_call>"
            ),
            calls=[("bash", {"command": "ls"}), ("get_time", {})],
            tools=TOOLS,
        ),
    ],
    ("qwen3_coder", "qwen3", ""): [
        Case(
            "call inside unclosed think",
            (
                "<think>\nLet me call it.\n<tool_call>\n<function=bash>\n<parameter=command>\n"
                "ls\n</parameter>\n</function>\n</tool_call>"
            ),
            "",
            "Let me call it.",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("hermes", "qwen3", "<|im_start|>assistant\n"): [
        Case(
            "brace too many",
            (
                '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"a\\""}}}\n'
                "</tool_call>"
            ),
            calls=[("bash", {"command": 'echo "a"'})],
            tools=TOOLS,
        ),
        Case(
            "brace missing",
            '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "raw line break",
            '<tool_call>\n{"name": "bash", "arguments": {"command": "a\nb\tc"}}\n</tool_call>',
            calls=[("bash", {"command": "a\nb\tc"})],
            tools=TOOLS,
        ),
        Case(
            "a list",
            (
                "<tool_call>\n"
                '[{"name": "bash", "arguments": {"command": "ls"}}, {"name": "get_time"'
                ', "arguments": {}}]\n</tool_call>'
            ),
            calls=[("bash", {"command": "ls"}), ("get_time", {})],
            tools=TOOLS,
        ),
        Case(
            "flat",
            '<tool_call>\n{"name": "bash", "command": "ls", "timeout": 5}\n</tool_call>',
            calls=[("bash", {"command": "ls", "timeout": 5})],
            tools=TOOLS,
        ),
        Case(
            "list as text is kept",
            (
                "<tool_call>\n"
                '{"name": "search", "arguments": {"query": "x", "paths": "[\\"a\\", \\"b\\"'
                ']"}}\n</tool_call>'
            ),
            calls=[("search", {"query": "x", "paths": '["a", "b"]'})],
            tools=TOOLS,
        ),
    ],
    ("glm47", "glm45", "<|assistant|>\n"): [
        Case(
            "missing arg_value",
            "<tool_call>bash<arg_key>command</arg_key>ls -la</arg_value></tool_call>",
            calls=[("bash", {"command": "ls -la"})],
            tools=TOOLS,
        ),
        Case(
            "a space instead of the key's tag",
            "<tool_call>bash command</arg_key><arg_value>ls</arg_value></tool_call>",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "no tag of the key",
            "<tool_call>bashcommand</arg_key><arg_value>ls</arg_value></tool_call>",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "stray arg_value",
            "<tool_call>get_time</arg_value></tool_call>",
            calls=[("get_time", {})],
            tools=TOOLS,
        ),
        Case(
            "a stray closing tag at the end",
            "<tool_call>get_time</arg_value>",
            calls=[("get_time", {})],
            tools=TOOLS,
        ),
        Case(
            "a doubled closing tag",
            (
                "<tool_call>bash<arg_key>command</arg_key></arg_key><arg_value>ls</arg_"
                "value></tool_call>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("glm45", "glm45", "<|assistant|>\n"): [
        Case(
            "own tags in a value",
            (
                "<tool_call>edit\n<arg_key>path</arg_key>\n<arg_value>a.md</arg_value>\n"
                "<arg_key>old</arg_key>\n<arg_value><arg_value>x</arg_value></arg_value>\n"
                "<arg_key>new</arg_key>\n<arg_value>y</arg_value>\n</tool_call>"
            ),
            calls=[("edit", {"path": "a.md", "old": "<arg_value>x</arg_value>", "new": "y"})],
            tools=TOOLS,
        ),
        Case(
            "a name and an object",
            '<tool_call>bash {"command": "ls"}</tool_call>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "a doubled argument",
            (
                "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n"
                "<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("openai", None, "<|start|>assistant"): [
        Case(
            "a doubled channel",
            (
                "<|channel|>commentary to=functions.bash<|channel|>commentary json<|mes"
                'sage|>{"command":"ls"}'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "a recipient before the channel",
            ' to=functions.bash<|channel|>commentary json<|message|>{"command":"ls"}',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "a question mark",
            '<|channel|>commentary? to=functions.bash json<|message|>{"command":"ls"}',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "dashes",
            (
                "<|channel|>––commentary to=functions.bash <|constrain|>json<|message|>"
                '{"command":"ls"}'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "without functions.",
            '<|channel|>commentary to=bash <|constrain|>json<|message|>{"command":"ls"}',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "no start",
            (
                "<|channel|>analysis<|message|>Hm.<|end|><|channel|>commentary to=funct"
                'ions.bash <|constrain|>json<|message|>{"command":"ls"}'
            ),
            "",
            "Hm.",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "a marker in a value",
            (
                '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"'
                'command":"echo \\"<|end|>\\""}'
            ),
            calls=[("bash", {"command": 'echo "<|end|>"'})],
            tools=TOOLS,
        ),
        Case(
            "a tool from training",
            (
                "<|channel|>commentary to=repo_browser.bash <|constrain|>json<|message|"
                '>{"command":"ls"}'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "a preamble",
            (
                "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant "
                'to=functions.bash<|channel|>commentary<|constrain|>json<|message|>{"co'
                'mmand":"ls"}'
            ),
            "Let me look.",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("deepseek_v31", "deepseek_v31", "<｜Assistant｜></think>"): [
        Case(
            "V3's form",
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n"
                '{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "no beginning of the section",
            (
                '<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜><'
                "｜tool▁calls▁end｜>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "no end of the call",
            (
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{"command": "ls'
                '"}<｜tool▁calls▁end｜>'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("deepseek_v4", None, "<｜Assistant｜></think>"): [
        Case(
            "no start",
            (
                'Ok.\n\n<｜DSML｜invoke name="bash">\n'
                '<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n'
                "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
            ),
            "Ok.",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("deepseek_v32", None, "<｜Assistant｜></think>"): [
        Case(
            "unterminated",
            (
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n'
                '<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n'
                '<｜DSML｜parameter name="timeout" string="false">5</｜DSML｜parameter>\n'
                "</｜DSML｜invoke>"
            ),
            calls=[("bash", {"command": "ls", "timeout": 5})],
            tools=TOOLS,
        ),
        Case(
            "arguments wrapped",
            (
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="bash">\n'
                '<｜DSML｜parameter name="arguments" string="false">{"command": "ls"}</｜D'
                "SML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "mention",
            'Use `<｜DSML｜invoke name="bash">` to run.',
            'Use `<｜DSML｜invoke name="bash">` to run.',
            calls=[],
            tools=TOOLS,
        ),
    ],
    ("mistral", None, "[/INST]"): [
        Case(
            "no marker of the arguments",
            'Sure.[TOOL_CALLS]bash{"command": "ls"}',
            "Sure.",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "spaces",
            '[TOOL_CALLS] bash [ARGS] {"command": "ls"}',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "only the marker of the arguments",
            'bash[ARGS]{"command": "ls"}',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "list not closed",
            '[TOOL_CALLS][{"name": "bash", "arguments": {"command": "ls"}}',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "invalid escape",
            '[TOOL_CALLS]bash[ARGS]{"command": "printf \'%s\' \\$HOME"}',
            calls=[("bash", {"command": "printf '%s' \\$HOME"})],
            tools=TOOLS,
        ),
        Case(
            "Python",
            '[TOOL_CALLS]bash(command="ls")',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("gemma4", None, "<|turn>model\n"): [
        Case(
            "parentheses and colons",
            '<|tool_call>call:bash(command: "ls -la", timeout: 5)<tool_call|>',
            calls=[("bash", {"command": "ls -la", "timeout": 5})],
            tools=TOOLS,
        ),
        Case(
            "JSON's and Python's quotes in a list",
            '<|tool_call>call:search{query:<|"|>x<|"|>,paths:["a",\'b\']}<tool_call|>',
            calls=[("search", {"query": "x", "paths": ["a", "b"]})],
            tools=TOOLS,
        ),
        Case(
            "JSON in an object",
            '<|tool_call>call:search{query:"x",opts:{"mode": "fast"}}<tool_call|>',
            calls=[("search", {"query": "x", "opts": {"mode": "fast"}})],
            tools=TOOLS,
        ),
        Case(
            "spaces around the name",
            '<|tool_call>call: bash {command: <|"|>ls<|"|>}<tool_call|>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "other brackets",
            '<tool_call>call:bash{command:<|"|>ls<|"|>}</tool_call>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("kimi_k2", "kimi_k2", "<|im_assistant|>assistant<|im_middle|>"): [
        Case(
            "a changed id",
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions_bash_1<|tool_"
                'call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_se'
                "ction_end|>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "spaces, and no section",
            (
                '<|tool_call_begin|> functions.bash:0 <|tool_call_argument_begin|> {"co'
                'mmand": "ls"} <|tool_call_end|>'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "in think",
            (
                "<think>Hm. <|tool_calls_section_begin|><|tool_call_begin|>functions.ba"
                'sh:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|to'
                "ol_calls_section_end|>"
            ),
            "",
            "Hm. ",
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "an object",
            (
                '<|tool_calls_section_begin|><|tool_call_begin|>{"name": "bash", "argum'
                'ents": {"command": "ls"}}<|tool_call_end|><|tool_calls_section_end|>'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "no marker of the arguments",
            (
                '<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0{"comma'
                'nd": "ls"}<|tool_call_end|><|tool_calls_section_end|>'
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("minimax_m2", "minimax_m2", ""): [
        Case(
            "no brackets",
            'invoke name="bash">\nparameter name="command">lsparameter>\ninvoke>\n',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "indented",
            (
                '<minimax:tool_call>\n  <invoke name="bash">\n'
                '    <parameter name="command">ls</parameter>\n  </invoke>\n'
                "</minimax:tool_call>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "options of a command line",
            '[TOOL_CALL]\n{tool => "bash", args => {\n  --command "ls"\n}}\n[/TOOL_CALL]',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "wrong close tag",
            (
                '<minimax:tool_call>\n<invoke name="edit">\n'
                '<parameter name="path">a</parameter>\n<parameter name="old">x</old>\n'
                '<parameter name="new">y</parameter>\n</invoke>\n</minimax:tool_call>'
            ),
            calls=[("edit", {"path": "a", "old": "x", "new": "y"})],
            tools=TOOLS,
        ),
    ],
    ("minimax_m3", None, ""): [
        Case(
            "without marks",
            '<tool_call>\n<invoke name="bash">\n<command>ls</command>\n</invoke>\n</tool_call>',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "parameter name",
            (
                ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="bash">]<]minimax[>['
                '<parameter name="command">ls]<]minimax[>[</parameter>]<]minimax[>[</in'
                "voke>]<]minimax[>[</tool_call>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("llama3_json", None, ""): [
        Case(
            "a method",
            '<|python_tag|>bash.call(command="ls")',
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
    ("lfm2", None, "<|im_start|>assistant\n"): [
        Case(
            "commas and quotes in a string",
            (
                "<|tool_call_start|>[edit(path='/tmp/h.py', old='', new='# Hi\\nprint(\"H"
                "ello, World!\")')]<|tool_call_end|>"
            ),
            calls=[
                ("edit", {"path": "/tmp/h.py", "old": "", "new": '# Hi\nprint("Hello, World!")'})
            ],
            tools=TOOLS,
        ),
    ],
    ("kimi_k3", None, ""): [
        Case(
            "space between marks and words",
            (
                '<|open|>tools <|sep|>\n<|open|> call tool="bash" index="1"<|sep|>\n'
                '<|open|>argument key="command" type="string"<|sep|>ls<|close|> argumen'
                "t<|sep|>\n<|close|>call <|sep|>\n<|close|>tools<|sep|>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
        Case(
            "an id in place of the name",
            (
                '<|open|>tools<|sep|><|open|>call tool="functions.bash:0"<|sep|><|open|'
                '>argument key="command" type="string"<|sep|>ls<|close|>argument<|sep|>'
                "<|close|>call<|sep|><|close|>tools<|sep|>"
            ),
            calls=[("bash", {"command": "ls"})],
            tools=TOOLS,
        ),
    ],
}
