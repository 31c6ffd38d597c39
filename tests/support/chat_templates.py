"""Chat templates in the manner of models that call tools."""

QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user
{{ m.content }}<|im_end|>
{% elif m.role == 'assistant' %}<|im_start|>assistant
{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Shows the results of several tools in one turn of the user's."""

LLAMA = """\
{%- for m in messages %}{% if m.tool_calls %}<|im_start|>assistant
{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}<|im_end|>
{% elif m.role == 'tool' %}<|im_start|>ipython
{{ m.content | tojson }}<|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if tools and loop.last %}{{ tools | tojson }}
{% endif %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}<|im_start|>assistant
{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"""
"""Shows a tool's result as JSON."""

PARTS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}\
<image>{% else %}{{ part.text }} | {% endif %}{% endfor %}{% endif %}{{ m.tool_calls | default([]) | tojson }}<|im_end|>
{% endfor %}{{ tools | tojson }}<|im_start|>assistant
"""
"""Iterates the parts of a message."""
