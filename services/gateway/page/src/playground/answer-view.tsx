/** An answer: its samples, and how fast it came. */

import { rate, seconds } from "../format.ts";
import { requestHref } from "../shell/route.ts";
import { tokensPerS, type Answer, type Sample } from "./answer.ts";
import { Tokens } from "./tokens.tsx";

export function AnswerView({ answer, running }: { answer: Answer; running: boolean }) {
  return (
    <div class="answer" aria-busy={running}>
      {answer.samples.map((sample, index) => (
        <SampleView key={index} sample={sample} title={answer.samples.length > 1 ? `Sample ${index + 1}` : ""} />
      ))}
      <Figures answer={answer} />
    </div>
  );
}

function SampleView({ sample, title }: { sample: Sample; title: string }) {
  // A sample's tokens include its reasoning and tool calls. A sample with either shows its text instead of its tokens.
  const shown = sample.tokens.length > 0 && sample.reasoning === "" && sample.toolCalls.length === 0;
  return (
    <div class="sample">
      {title && <h3>{title}</h3>}
      {sample.reasoning && (
        <details open={sample.text === ""}>
          <summary>Reasoning</summary>
          <p class="prose muted">{sample.reasoning}</p>
        </details>
      )}
      {shown ? <Tokens tokens={sample.tokens} /> : sample.text && <p class="prose">{sample.text}</p>}
      {sample.toolCalls.map((call) => (
        <p key={call.id} class="tool-call">
          <span class="tag">calls</span>{" "}
          <code>
            {call.name}({call.arguments})
          </code>
        </p>
      ))}
      {sample.finish && sample.finish !== "stop" && <span class="tag">{sample.finish}</span>}
    </div>
  );
}

/** What the page has measured, and what the server says of itself. */
function Figures({ answer }: { answer: Answer }) {
  const { usage, timings, firstMs, askedMs } = answer;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const figures: [string, string, string][] = [];
  if (firstMs !== null) figures.push(["ttft", "first token", seconds((firstMs - askedMs) / 1000)]);
  const speed = tokensPerS(answer);
  if (speed !== null) figures.push(["speed", "tokens/s", rate(speed)]);
  if (usage) {
    figures.push(["prompt", "prompt", `${usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`]);
    figures.push(["output", "output", `${usage.completion_tokens} tokens`]);
  }
  if (timings) {
    figures.push(["queue", "queue", seconds(timings.queue_ms / 1000)]);
    figures.push(["prefill", "prefill", seconds(timings.prompt_ms / 1000)]);
    figures.push(["decode", "decode", seconds(timings.predicted_ms / 1000)]);
    if (timings.preemptions) figures.push(["preemptions", "preemptions", String(timings.preemptions)]);
    if (timings.restarts) figures.push(["restarts", "failures survived", String(timings.restarts)]);
  }
  if (figures.length === 0) return null;
  return (
    <dl class="figures num">
      {figures.map(([name, label, value]) => (
        <div key={name} data-figure={name}>
          <dt>{label}</dt> <dd>{value}</dd>
        </div>
      ))}
      {usage && (
        <div>
          <a href={requestHref(answer.id)}>timeline</a>
        </div>
      )}
    </dl>
  );
}
