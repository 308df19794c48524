/** A chat: messages, tool calls that a person answers, and how the model goes on. */

import { useState } from "preact/hooks";
import { KeyForm } from "../shell/key.tsx";
import type { Answer, ToolCall } from "./answer.ts";
import { AnswerView } from "./answer-view.tsx";
import { AskForm } from "./ask-form.tsx";
import { chatBody, NO_OPTIONS, type Message, type Options } from "./body.ts";
import { fieldsOf, type OpenApi } from "./fields.ts";
import { OptionFields } from "./options.tsx";
import { Problem } from "./problem.tsx";
import { useAsking } from "./stream.ts";

const PATH = "/v1/chat/completions";

/** A message as it is shown. `answer`: for a message of the model, the answer with its figures. */
interface Shown extends Message {
  answer?: Answer;
}

export function Chat({ api }: { api: OpenApi }) {
  const [system, setSystem] = useState("");
  const [text, setText] = useState("What is 3 + 4?");
  const [messages, setMessages] = useState<Shown[]>([]);
  const [options, setOptions] = useState<Options>(NO_OPTIONS);
  const { answer, running, problem, ask, stop, clear } = useAsking();
  const fields = fieldsOf(api, PATH);
  const open = messages.at(-1)?.tool_calls?.map(({ id, function: called }) => ({ id, ...called })) ?? [];

  const go = async (history: Shown[]) => {
    setMessages(history);
    const said = history.map(({ answer: _, ...message }) => message);
    const first: Message[] = system.trim() ? [{ role: "system", content: system }] : [];
    const found = await ask(PATH.slice(1), () => chatBody(fields, options, [...first, ...said]));
    clearAnswered(found, history);
  };
  const clearAnswered = (found: Answer | null, history: Shown[]) => {
    const sample = found?.samples[0];
    if (!found || !sample) return;
    clear();
    setMessages([...history, spoken(found)]);
  };
  const send = () => {
    if (!text.trim()) return;
    setText("");
    void go([...messages, { role: "user", content: text }]);
  };
  const lastQuestion = messages.findLastIndex((message) => message.role === "user");
  return (
    <div class="play">
      <section class="card conversation" aria-label="Chat">
        <details>
          <summary>System prompt{system.trim() && " (set)"}</summary>
          <textarea
            aria-label="System prompt"
            rows={3}
            value={system}
            onInput={({ currentTarget }) => setSystem(currentTarget.value)}
          />
        </details>
        <div class="messages" role="log" aria-live="polite" aria-label="Messages">
          {messages.map((message, index) => (
            <MessageView key={index} message={message} />
          ))}
          {answer && (
            <article class="message assistant">
              <h3>assistant</h3>
              <AnswerView answer={answer} running={running} />
            </article>
          )}
          {running && !answer && <p class="muted">waits for the first token…</p>}
        </div>
        <Problem problem={problem} fields={fields} />
        {problem?.needsKey && <KeyForm why={problem.message} />}
        {open.length > 0 && !running && (
          <ToolResults calls={open} onDone={(results) => void go([...messages, ...results])} />
        )}
        <AskForm
          label="Message"
          text={text}
          rows={3}
          running={running}
          send="Send"
          onInput={setText}
          onSend={send}
          onStop={stop}
        />
        <div class="row">
          <button
            type="button"
            disabled={running || lastQuestion < 0}
            onClick={() => void go(messages.slice(0, lastQuestion + 1))}
          >
            Ask again
          </button>
          <button
            type="button"
            disabled={messages.length === 0}
            onClick={() => {
              clear();
              setMessages([]);
            }}
          >
            New chat
          </button>
        </div>
      </section>
      <OptionFields fields={fields} options={options} onChange={setOptions} problem={problem} hasTools />
    </div>
  );
}

/** The assistant's message from the first sample of an answer. */
function spoken(answer: Answer): Shown {
  const sample = answer.samples[0];
  const calls = sample?.toolCalls ?? [];
  const message: Shown = { role: "assistant", content: sample?.text || (calls.length > 0 ? null : ""), answer };
  if (calls.length > 0) {
    message.tool_calls = calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
  }
  return message;
}

function MessageView({ message }: { message: Shown }) {
  return (
    <article class={`message ${message.role}`}>
      <h3>{message.role}</h3>
      {message.answer ? (
        <AnswerView answer={message.answer} running={false} />
      ) : (
        <p class="prose">{message.content}</p>
      )}
    </article>
  );
}

/** Fields for what the called tools would have answered. */
function ToolResults({ calls, onDone }: { calls: ToolCall[]; onDone: (results: Message[]) => void }) {
  const [texts, setTexts] = useState<Record<string, string>>({});
  const submit = (event: Event) => {
    event.preventDefault();
    onDone(calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: texts[id] ?? "" })));
  };
  return (
    <form class="ask-form" onSubmit={submit}>
      {calls.map((call) => (
        <label key={call.id} class="field">
          <span>
            Result of <code>{call.name}</code>
          </span>
          <input
            type="text"
            name={`result-${call.name}`}
            placeholder='{"weather": "sunny"}'
            value={texts[call.id] ?? ""}
            onInput={({ currentTarget }) => setTexts({ ...texts, [call.id]: currentTarget.value })}
          />
        </label>
      ))}
      <div class="row">
        <button class="primary" type="submit">
          Give the result
        </button>
      </div>
    </form>
  );
}
