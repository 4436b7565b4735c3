"""Chat templates that behave like the ones in the field, each with what it is there for."""

LLAMA3 = """{{- '<s>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}{{- call.function | tojson }}{%- endfor %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
"""Begins with bos, trims contents, prints tool calls."""

MISTRAL = """{{- '<s>' }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if system and loop.index0 >= turns | length - 2 else '') }}
        {{- message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""
"""No prompt to generate, no spaces of its own round a turn, the system text moves to the last user turn."""

QWEN3 = """{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set words = message.content %}
    {%- if message.role == 'assistant' %}
        {%- set thought = message.reasoning_content | default('') %}
        {%- if '</think>' in words %}
            {%- set thought = words.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set words = words.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {%- set words = '<think>\n' + thought + '\n</think>\n\n' + words %}
        {%- endif %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + words + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Thinking is kept after the last user turn only, and added (empty) to a last turn that has none."""

THINKING_PROMPT = QWEN3.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
"""The prompt to generate opens the thinking; turns whose thinking was left out don't begin with it."""

MARKED = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{- message.content }}{% endgeneration %}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""Generation marks, round the words only."""

HARMONY = """{%- for message in messages %}
    {{- '<|start|>' + message.role + '>' + message.content }}
    {{- '<|return|>' if loop.last and message.role == 'assistant' and not add_generation_prompt else '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant>' }}{%- endif %}"""
"""A turn ends with one token in the middle of a conversation and with another at its end."""

ENDS_ONCE = """{%- for message in messages %}
    {{- '[INST]' + message.role + '\n' + message.content }}
    {{- '</s>' if loop.last and message.role == 'assistant' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[INST]assistant\n' }}{%- endif %}"""
"""Turns in the middle have no end of their own: what to learn there cannot be told."""

UPSIDE_DOWN = """{%- for message in messages %}
    {{- message.role + ' (' ~ messages | map(attribute='content') | join('') | length ~ '): ' }}
    {{- message.content + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
"""Every line depends on every message: no turn can be located."""

NO_PROMPT = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}"""
"""ChatML that ignores the request for a prompt to generate."""
