/** The step timeline: for each worker its last steps, with the time in scheduler and cache, on the link, and on the
 * device. Steps that overlap have lanes of their own: those are the plans in flight. */

import { useEffect, useRef, useState } from "preact/hooks";
import { count, counted, seconds } from "../format.ts";
import { useWidth } from "../shell/width.ts";
import type { SchedulerView, Step } from "../types.ts";
import { cleared } from "./canvas.ts";
import { lanes, meanPhases, phasesOf } from "./history.ts";

const SPANS_S = [0.5, 1, 2, 5];
const LANE = 14;
const HEAD = 18;
const AXIS = 18;
const MAX_LANES = 4;
const PHASES = [
  ["scheduler", "--c-orange", "scheduler and cache"],
  ["link", "--c-pale", "link, and waiting for the device"],
  ["device", "--c-blue", "device"],
] as const;

interface Box {
  step: Step;
  x: number;
  y: number;
  width: number;
}

export function Steps({ view, steps }: { view: SchedulerView; steps: Step[] }) {
  const [spanS, setSpanS] = useState(1);
  const [held, setHeld] = useState<{ view: SchedulerView; steps: Step[] } | null>(null);
  const [selected, setSelected] = useState<Step | null>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const boxes = useRef<Box[]>([]);
  const [width, box] = useWidth();
  const shown = held ?? { view, steps };
  const sinceS = shown.view.at_s - spanS;
  const visible = shown.steps.filter((step) => step.ended_s >= sinceS);
  useEffect(() => {
    if (canvas.current) boxes.current = draw(canvas.current, shown.view, visible, sinceS, spanS, width, selected);
  });
  const mean = meanPhases(visible);
  const move = (event: PointerEvent) => {
    const [x, y] = [event.offsetX, event.offsetY];
    const hit = boxes.current.findLast((one) => x >= one.x && x <= one.x + Math.max(one.width, 3) && y >= one.y && y < one.y + LANE);
    if (hit) setSelected(hit.step);
  };
  const key = (event: KeyboardEvent) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const order = [...visible].sort((a, b) => a.planned_s - b.planned_s);
    const at = order.findIndex((step) => same(step, selected));
    setSelected(order[at < 0 ? order.length - 1 : Math.min(Math.max(at + by, 0), order.length - 1)] ?? null);
    setHeld(shown);
  };
  return (
    <section class="card" aria-labelledby="steps-title">
      <div class="row spread">
        <h2 id="steps-title">Steps</h2>
        <div class="row">
          <label class="row">
            <span class="muted">Last</span>
            <select value={spanS} onChange={(event) => setSpanS(Number(event.currentTarget.value))}>
              {SPANS_S.map((one) => (
                <option key={one} value={one}>
                  {seconds(one)}
                </option>
              ))}
            </select>
          </label>
          <button type="button" aria-pressed={held !== null} onClick={() => setHeld(held ? null : shown)}>
            {held ? "Go on" : "Hold"}
          </button>
        </div>
      </div>
      <p class="legend num">
        {PHASES.map(([phase, color, name]) => (
          <span key={phase}>
            <i style={{ background: `var(${color})` }} />
            {name} {mean && <strong>{seconds(mean[phase])}</strong>}
          </span>
        ))}
        <span class="muted">{mean ? `means of ${counted(visible.length, "step")}` : "no steps: nothing runs"}</span>
      </p>
      <div ref={box}>
        <canvas
          ref={canvas}
          class="steps"
          tabIndex={0}
          role="img"
          aria-label={`Steps of the last ${seconds(spanS)}; left and right arrow keys choose one`}
          onPointerMove={move}
          onPointerDown={move}
          onKeyDown={key}
        />
      </div>
      <p class="step-detail num" aria-live="polite">
        {selected ? describe(selected, view) : <span class="muted">Point at a step, or use the arrow keys, for its figures.</span>}
      </p>
      {view.num_missed_steps > 0 && (
        <p class="muted">{counted(view.num_missed_steps, "step")} of the last snapshot are not shown.</p>
      )}
    </section>
  );
}

function same(a: Step, b: Step | null): boolean {
  return b !== null && a.worker === b.worker && a.step === b.step;
}

function describe(step: Step, view: SchedulerView): string {
  const { scheduler, link, device } = phasesOf(step);
  const worker = view.workers.find((one) => one.worker === step.worker)?.name ?? `worker ${step.worker}`;
  const work = [counted(step.num_decodes, "decode")];
  if (step.num_prefills) work.push(`${counted(step.num_prefills, "prefill")} of ${counted(step.new_tokens, "token")}`);
  return (
    `Step ${count(step.step)} of ${worker}: ${work.join(", ")}, ${counted(step.context_tokens, "attended token")}. ` +
    `Scheduler and cache ${seconds(scheduler)}, link and waiting ${seconds(link)}, device ${seconds(device)}.`
  );
}

function draw(
  canvas: HTMLCanvasElement,
  view: SchedulerView,
  steps: Step[],
  sinceS: number,
  spanS: number,
  width: number,
  selected: Step | null,
): Box[] {
  const rows = view.workers.map((worker) => {
    const placed = lanes(steps.filter((step) => step.worker === worker.worker), MAX_LANES);
    return { worker, placed, depth: Math.max(1, ...placed.map((one) => one.lane + 1)) };
  });
  const height = AXIS + rows.reduce((sum, row) => sum + HEAD + row.depth * (LANE + 2), 0);
  const context = cleared(canvas, width, height);
  if (!context) return [];
  const style = getComputedStyle(document.documentElement);
  const color = (name: string) => style.getPropertyValue(name);
  const x = (atS: number) => ((atS - sinceS) / spanS) * width;
  context.font = `12px ${style.fontFamily}`;
  const boxes: Box[] = [];
  let y = 0;
  for (const { worker, placed, depth } of rows) {
    context.fillStyle = color("--muted");
    context.fillText(worker.name || `worker ${worker.worker}`, 0, y + HEAD - 5);
    y += HEAD;
    context.fillStyle = color("--raised");
    context.fillRect(0, y, width, depth * (LANE + 2));
    for (const { step, lane } of placed) {
      const top = y + 1 + lane * (LANE + 2);
      let fromS = step.planned_s;
      const phases = phasesOf(step);
      for (const [phase, name] of PHASES) {
        const [left, right] = [Math.max(0, x(fromS)), Math.max(0, x(fromS + phases[phase]))];
        context.fillStyle = color(name);
        context.fillRect(left, top, Math.max(right - left - (phase === "device" ? 0.6 : 0), 0.4), LANE);
        fromS += phases[phase];
      }
      const at: Box = { step, x: x(step.planned_s), y: top, width: x(step.ended_s) - x(step.planned_s) };
      boxes.push(at);
      if (step.num_prefills) {
        context.fillStyle = color("--c-yellow");
        context.fillRect(Math.max(0, at.x), top + LANE - 3, Math.min(at.width, at.x + at.width), 3);
      }
      if (same(step, selected)) {
        context.strokeStyle = color("--text");
        context.lineWidth = 2;
        context.strokeRect(at.x, top, Math.max(at.width, 3), LANE);
      }
    }
    y += depth * (LANE + 2);
  }
  drawAxis(context, color("--muted"), spanS, width, y);
  return boxes;
}

function drawAxis(context: CanvasRenderingContext2D, color: string, spanS: number, width: number, y: number): void {
  context.fillStyle = color;
  const ticks = width < 500 ? 2 : 5;
  for (let tick = 0; tick <= ticks; tick++) {
    const at = (width * tick) / ticks;
    context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
    const ago = spanS * (1 - tick / ticks);
    context.fillText(ago ? `−${seconds(ago)}` : "now", at, y + 13);
  }
  context.textAlign = "left";
}
