//! Templates are written as Jinja writes them, and held to their bounds.

use serde_json::json;

use super::*;

#[test]
fn messages_become_a_prompt() {
    let source = "{{ bos_token }}{% for m in messages %}[{{ m['role'].upper() }}]{{ m.content }}{% endfor %}\
                  {% if add_generation_prompt %}[A]{% endif %}";
    let template = ChatTemplate::new(source, Some("<s>")).unwrap();
    let prompt = template.render(&[Message::new("system", "Be brief."), Message::new("user", "Hi")], &[]).unwrap();
    assert_eq!(prompt, "<s>[SYSTEM]Be brief.[USER]Hi[A]");
    assert!(!template.knows_tools());
}

#[test]
fn tools_and_their_calls_are_told_as_in_python() {
    let source = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}\
                  {% for m in messages %}[{{ m.role }}]{{ m.content }}\
                  {% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>{% endfor %}\
                  {% endfor %}";
    let template = ChatTemplate::new(source, None).unwrap();
    assert!(template.knows_tools());
    let call = json!({"type": "function", "function": {"name": "look", "arguments": {"b": [1, 2], "a": "é<"}}});
    let asked = Message { tool_calls: vec![call], ..Message::new("assistant", "") };
    let answered = Message { tool_call_id: Some("1".to_owned()), ..Message::new("tool", "rain") };
    let tool = json!({"type": "function", "function": {"name": "look"}});
    let prompt = template.render(&[asked, answered], &[tool]).unwrap();
    assert_eq!(
        prompt,
        "{\"type\": \"function\", \"function\": {\"name\": \"look\"}}\n\
         [assistant]<tool_call>{\"b\": [1, 2], \"a\": \"é<\"}</tool_call>[tool]rain"
    );
    let indented = ChatTemplate::new("{{ messages[0].role | tojson(indent=4) }}", None).unwrap();
    assert_eq!(indented.render(&[Message::new("user", "")], &[]).unwrap(), "\"user\"");
}

#[test]
fn a_bad_template_is_refused_and_an_endless_one_ends() {
    let check = |source: &str, part: &str| {
        let rendered = ChatTemplate::new(source, None).and_then(|t| t.render(&[Message::new("user", "secret")], &[]));
        let reason = rendered.unwrap_err().to_string();
        assert!(reason.contains(part), "{part:?} is not in {reason}");
        assert!(!reason.contains("secret"), "what people say is in {reason}");
    };
    check("{% for %}", "chat");
    check("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "fuel");
    check("{{ raise_exception('roles must alternate') }}", "roles must alternate");
    check("{% set x = messages[0].content %}{{ x + 1 }}", "+ operator");
    check(&"{{ 1 }}".repeat(50_000), "bytes");
    check(&format!("{{{{ {}1 }}}}", "1 + ".repeat(9_999)), "words");
    check(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(999)), "branches");
    // What is made of constants is made by the compiler, before anything runs.
    let constants = "multiplies constants";
    check("{% set a = 'x' * 100000000 %}", constants);
    check("{% if 0 %}{{ (10000 * 'x') * 10000 }}{% endif %}", constants);
    check("{{ 'x' * 10 ** 8 }}", constants);
    check("{{ 'x' * (9999 + 9999) * 999 }}", constants);
    check("{{ 7 in [1, 2] * 100000000 }}", constants);
    check(&"{{ 'x' * 99999 }}".repeat(99), constants);
    check("{% block a %}{% endblock %}", "several files");
    check("{% include '/etc/passwd' %}", "other templates");
}

/// With the meter between its instructions a template writes what it writes without.
#[test]
fn the_meter_changes_nothing_that_is_written() {
    let call = json!({"type": "function", "function": {"name": "look", "arguments": {"at": [1, {"deep": "é"}]}}});
    let messages = [
        Message::new("system", "Be brief.\nVery."),
        Message::new("user", " Hi <there> & \"you\" "),
        Message { tool_calls: vec![call.clone()], ..Message::new("assistant", "<think>\nwell\n</think>\n\nHello.") },
        Message { tool_call_id: Some("1".to_owned()), ..Message::new("tool", "rain") },
    ];
    let check = |source: &str, tools: &[Value]| {
        let metered = ChatTemplate::new(source, Some("<s>")).unwrap().render(&messages, tools).unwrap();
        let mut plain = minijinja::Environment::new();
        plain.set_trim_blocks(true);
        plain.set_lstrip_blocks(true);
        plain.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        let ours = filters::environment(&Meter::of_input(&[]).unwrap());
        plain.add_filter("tojson", move |value: Jinja, indent: minijinja::value::Kwargs| {
            let indent: Option<usize> = indent.get("indent")?;
            let call = indent.map_or("value | tojson".to_owned(), |n| format!("value | tojson(indent={n})"));
            let text = ours.compile_expression(&call)?.eval(context! { value })?;
            Ok::<_, minijinja::Error>(Jinja::from_safe_string(text.to_string()))
        });
        let tools = (!tools.is_empty()).then_some(tools);
        let variables = context! { messages, tools, add_generation_prompt => true, bos_token => "<s>" };
        assert_eq!(metered, plain.render_str(source, variables).unwrap(), "{source}");
    };
    for source in [
        include_str!("../../../fuzz/corpus/template/good-chatml"),
        include_str!("../../../fuzz/corpus/template/good-macros"),
        include_str!("../../../fuzz/corpus/template/good-plain"),
        "{% for m in messages recursive %}{{ m.role }}{% if m.tool_calls %}{{ loop(m.tool_calls) }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{% if loop.first %}{% continue %}{% endif %}\
         {{ 3 * loop.index }} {{ 2.0 * loop.index }} {{ 'a' ~ 1 }} {{ '-' * 3 }} {{ 2 ** 3 }}{% else %}none{% endfor %}",
        "{% set x %}{% for i in range(5, 1, -2) %}{{ i }},{% endfor %}{% endset %}{{ x }}{{ range(4)[1:] | list }}",
        "{% macro wrap(t) %}<{{ t }}{{ caller() }}>{% endmacro %}{% call wrap('b') %}in{% endcall %}\
         {% filter upper %}up {{ messages[0].content | indent }}{% endfilter %}{{ undefined_thing or 'none' }}",
        "{{ messages[0].content.replace('e', 'E', 1) }}{{ ', '.join(['a', 1]) }}{{ [1, none, 'x'] | join('-') }}\
         {{ messages[-1]['content'] is defined and messages | length == 4 }}{{ {'a': [1, 2]} }}",
        "{% with a = messages | map(attribute='role') | list %}{{ a | first }}{{ a[::-1] }}{{ a | sort | last }}{% endwith %}",
    ] {
        check(source, &[]);
        check(source, &[json!({"type": "function", "function": {"name": "look", "parameters": {"a": null}}})]);
    }
}

/// What a template makes is bounded by what it is given, however it goes about it.
#[test]
fn a_greedy_template_is_refused() {
    let check = |body: &str, part: &str| {
        let source = format!(
            "{{% set ns = namespace(x='ab', l=[1]) %}}{{% for i in range(100000) %}}{body}{{% endfor %}}{{{{ ns.x }}}}"
        );
        let template = ChatTemplate::new(&source, None).unwrap();
        let reason = template.render(&[Message::new("user", "Hi")], &[]).unwrap_err().to_string();
        assert!(reason.contains(part), "{body}: {part:?} is not in {reason}");
    };
    let memory = "more memory";
    check("{% set ns.x = ns.x ~ ns.x %}", memory);
    check("{% set ns.x = ns.x + ns.x %}", memory);
    check("{% set ns.x = ns.x * 3 %}", memory);
    check("{% set ns.x = ns.x * 1152921504606846976 %}", memory);
    check("{% set n = 1152921504606846976 %}{% set ns.x = [1, 2] * n %}", "cannot multiply");
    check("{% set ns.x = ns.x | replace('', ns.x) %}", memory);
    check("{% set ns.x = ns.x.replace('a', ns.x) %}", memory);
    check("{% set ns.x = ns.x | indent(99999999, true) %}", memory);
    check("{% set ns.x = [ns.x, ns.x] | join(ns.x) %}", memory);
    check("{% set ns.x = ns.x.join([1, 2, 3]) %}", memory);
    check("{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}", memory);
    check("{% set ns.x %}{{ ns.x }} and so on{% endset %}", memory);
    check("{% set ns.x = [ns.x, ns.x] %}", memory);
    check("{% set ns.x = {'a': ns.x, 'b': ns.x} %}", memory);
    check("{% set ns.x = [ns.x, ns.x] | tojson(indent=16) %}", memory);
    check("{% set ns.x = ns.x | upper | list | string %}", memory);
    check("{% set ns.l = ns.l + ns.l %}", memory);
    check("{% set ns.l = ns.l + [i] %}", memory);
    check("{% set ns.l = range(99999) | list %}", memory);
    check("{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns.x = f(ns.x) %}", memory);
    check("only what stands in the template, again and again", memory);
    check("{% set ns.x = [ns.x] %}", "deeply");
    check("{% set ns.me = ns %}", "namespace into another");
    check("{% set ns.me = [ns] %}", "namespace into another");
    check("{% set ns.l = ns.l | batch(999999999, 1) %}", "batch is unknown");
    check("{% set ns.x = '%999999999d'.format(1) %}", "format is not supported");
}
