/** A completion: a prompt, and how it goes on. */

import { useState } from "preact/hooks";
import { KeyForm } from "../shell/key.tsx";
import { AnswerView } from "./answer-view.tsx";
import { AskForm } from "./ask-form.tsx";
import { completionBody, NO_OPTIONS } from "./body.ts";
import { fieldsOf, type OpenApi } from "./fields.ts";
import { OptionFields } from "./options.tsx";
import { Problem } from "./problem.tsx";
import { useAsking } from "./stream.ts";

const PATH = "/v1/completions";

export function Completion({ api }: { api: OpenApi }) {
  const [prompt, setPrompt] = useState("Once there was a fox");
  const [options, setOptions] = useState({ ...NO_OPTIONS, values: { max_tokens: "100" } });
  const { answer, running, problem, ask, stop } = useAsking();
  const fields = fieldsOf(api, PATH);
  const send = () => void ask(PATH.slice(1), () => completionBody(fields, options, prompt));
  return (
    <div class="play">
      <section class="card conversation" aria-label="Completion">
        <AskForm
          label="Prompt"
          text={prompt}
          rows={5}
          running={running}
          send="Complete"
          onInput={setPrompt}
          onSend={send}
          onStop={stop}
        />
        <Problem problem={problem} fields={fields} />
        {problem?.needsKey && <KeyForm why={problem.message} />}
        <div role="log" aria-live="polite">
          {answer && <AnswerView answer={answer} running={running} />}
        </div>
      </section>
      <OptionFields
        fields={fields}
        options={options}
        onChange={(changed) => setOptions({ ...changed, values: { ...changed.values } as typeof options.values })}
        problem={problem}
        hasTools={false}
      />
    </div>
  );
}
