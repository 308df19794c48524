/** The controls of all options that the server has for a path. */

import type { ComponentChildren } from "preact";
import { STRUCTURES, type Options, type Structure } from "./body.ts";
import { isUsual, type Field } from "./fields.ts";

export interface FieldProblem {
  message: string;
  param: string;
}

interface Props {
  fields: Field[];
  options: Options;
  onChange: (options: Options) => void;
  problem: FieldProblem | null;
  hasTools: boolean;
}

const HINTS: Record<Structure, string> = {
  none: "",
  json: '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
  regex: "[0-9]{1,3}",
  choice: "yes\nno\nmaybe",
  grammar: 'start: "yes" | "no"',
};
const TOOL_HINT = `[{"type": "function", "function": {"name": "get_weather",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]`;

/** Whether a problem is about this field or a part of it. */
export function concerns(problem: FieldProblem | null, name: string): boolean {
  const param = problem?.param ?? "";
  return param === name || param.startsWith(`${name}.`) || param.startsWith(`${name}[`);
}

export function OptionFields({ fields, options, onChange, problem, hasTools }: Props) {
  const set = (change: Partial<Options>) => onChange({ ...options, ...change });
  const control = (field: Field) => (
    <Control
      key={field.name}
      field={field}
      text={options.values[field.name] ?? ""}
      problem={problem}
      onInput={(text) => set({ values: { ...options.values, [field.name]: text } })}
    />
  );
  const others = fields.filter((field) => !isUsual(field));
  const isAmongOthers = others.some((field) => concerns(problem, field.name));
  return (
    <section class="card options" aria-labelledby="options-title">
      <div class="row spread">
        <h2 id="options-title">Options</h2>
        <button type="button" onClick={() => set({ values: {} })} disabled={!Object.values(options.values).some(Boolean)}>
          Defaults
        </button>
      </div>
      <div class="option-grid">
        {fields.filter(isUsual).map(control)}
        <Labelled name="logprobs" problem={problem} help="shown when you point at a token">
          <select
            name="logprobs"
            value={options.logprobs === null ? "" : String(options.logprobs)}
            onChange={({ currentTarget }) =>
              set({ logprobs: currentTarget.value === "" ? null : Number(currentTarget.value) })
            }
          >
            <option value="">none</option>
            {[0, 2, 4, 8, 16].map((num) => (
              <option key={num} value={num}>
                {num === 0 ? "of the sampled token" : `of the sampled and the ${num} likeliest tokens`}
              </option>
            ))}
          </select>
        </Labelled>
      </div>
      <Labelled name="structured_outputs" problem={problem} label="Structured output">
        <select
          name="structure"
          value={options.structure}
          onChange={({ currentTarget }) => set({ structure: currentTarget.value as Structure })}
        >
          {STRUCTURES.map((kind) => (
            <option key={kind} value={kind}>
              {kind === "json" ? "JSON schema" : kind}
            </option>
          ))}
        </select>
        {options.structure !== "none" && (
          <textarea
            class="mono"
            name="structure-text"
            aria-label={`Structured output: ${options.structure}`}
            rows={4}
            spellcheck={false}
            placeholder={HINTS[options.structure]}
            value={options.structureText}
            onInput={({ currentTarget }) => set({ structureText: currentTarget.value })}
          />
        )}
      </Labelled>
      {hasTools && (
        <details open={options.tools !== "" || concerns(problem, "tools")}>
          <summary>Tools</summary>
          <Labelled name="tools" problem={problem} label="Definitions (JSON)">
            <textarea
              class="mono"
              name="tools"
              rows={5}
              spellcheck={false}
              placeholder={TOOL_HINT}
              value={options.tools}
              onInput={({ currentTarget }) => set({ tools: currentTarget.value })}
            />
          </Labelled>
          <div class="row">
            <button type="button" onClick={() => set({ tools: TOOL_HINT })}>
              Fill in an example
            </button>
            <label class="row">
              tool_choice
              <select
                name="tool_choice"
                value={options.toolChoice}
                onChange={({ currentTarget }) => set({ toolChoice: currentTarget.value as Options["toolChoice"] })}
              >
                {["auto", "required", "none"].map((choice) => (
                  <option key={choice}>{choice}</option>
                ))}
              </select>
            </label>
          </div>
        </details>
      )}
      {/* If an error concerns a hidden option, open the section that contains it. */}
      <details key={String(isAmongOthers)} open={isAmongOthers}>
        <summary>More options ({others.length})</summary>
        <div class="option-grid">{others.map(control)}</div>
      </details>
    </section>
  );
}

interface LabelledProps {
  name: string;
  problem: FieldProblem | null;
  label?: string;
  help?: string;
  children: ComponentChildren;
}

/** A control with its name, help, and what the server says against it. */
function Labelled({ name, problem, label = name, help = "", children }: LabelledProps) {
  const isWrong = concerns(problem, name);
  return (
    <div class={isWrong ? "option wrong" : "option"} data-option={name}>
      <label class="field">
        <span class={label === name ? "mono" : ""}>{label}</span>
        {children}
      </label>
      {help && <small class="muted">{help}</small>}
      {isWrong && (
        <small class="option-problem" role="alert">
          {problem?.message}
        </small>
      )}
    </div>
  );
}

interface ControlProps {
  field: Field;
  text: string;
  problem: FieldProblem | null;
  onInput: (text: string) => void;
}

function Control({ field, text, problem, onInput }: ControlProps) {
  const { name, kind, range } = field;
  const shared = { name, value: text, "aria-invalid": concerns(problem, name) };
  const help = [range, field.help].filter(Boolean).join("; ");
  return (
    <Labelled name={name} problem={problem} help={help}>
      {kind === "choice" || kind === "boolean" ? (
        <select {...shared} onChange={({ currentTarget }) => onInput(currentTarget.value)}>
          <option value="">default</option>
          {(kind === "boolean" ? ["true", "false"] : field.values).map((value) => (
            <option key={value}>{value}</option>
          ))}
        </select>
      ) : kind === "lines" || kind === "json" ? (
        <textarea
          {...shared}
          class="mono"
          rows={text.includes("\n") ? 3 : 1}
          spellcheck={false}
          placeholder={kind === "lines" ? "one a line" : "JSON"}
          onInput={({ currentTarget }) => onInput(currentTarget.value)}
        />
      ) : (
        <input
          {...shared}
          type="text"
          inputMode={kind === "number" ? "decimal" : "text"}
          autocomplete="off"
          placeholder="default"
          onInput={({ currentTarget }) => onInput(currentTarget.value)}
        />
      )}
    </Labelled>
  );
}
