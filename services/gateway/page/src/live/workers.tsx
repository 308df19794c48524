/** Each worker: slots, blocks, plans in flight. */

import { count, counted, seconds, share } from "../format.ts";
import type { BlockMap as Blocks, SchedulerView, WorkerShown } from "../types.ts";
import { BlockMap } from "./block-map.tsx";

export function Workers({ view, maps }: { view: SchedulerView; maps: Blocks[] }) {
  if (!view.workers.length) return <p class="notice">No worker is attached: requests wait.</p>;
  return (
    <div class="workers">
      {view.workers.map((worker) => (
        <Worker key={worker.worker} worker={worker} map={maps.find((map) => map.worker === worker.worker)} />
      ))}
    </div>
  );
}

function Worker({ worker, map }: { worker: WorkerShown; map: Blocks | undefined }) {
  const used = worker.num_blocks - worker.num_available_blocks;
  const decoding = worker.num_running - worker.num_prefilling;
  return (
    <section class="card worker" aria-label={`Worker ${worker.name}`} data-worker={worker.worker}>
      <div class="row">
        <h3>{worker.name || `worker ${worker.worker}`}</h3>
        {worker.draining && <span class="tag">draining</span>}
        <span class="muted num">{`link ${worker.worker}`}</span>
      </div>
      <dl class="facts num">
        <Bar
          label="Slots"
          text={`${count(worker.num_running)} of ${count(worker.num_slots)}`}
          parts={[
            ["decode", decoding, "--c-green"],
            ["prefill", worker.num_prefilling, "--c-orange"],
          ]}
          all={worker.num_slots}
        />
        <Bar
          label="KV blocks"
          text={`${count(used)} of ${count(worker.num_blocks)} (${share(used, worker.num_blocks)})`}
          parts={[["in use", used, "--c-blue"]]}
          all={worker.num_blocks}
        />
        <div>
          <dt>Plans in flight</dt>
          <dd>
            <span class="dots" aria-hidden="true">
              {Array.from({ length: Math.min(worker.window, 16) }, (_, index) => (
                <i key={index} class={index < worker.in_flight ? "on" : ""} />
              ))}
            </span>{" "}
            {worker.in_flight} of {worker.window}
          </dd>
        </div>
        <div>
          <dt>Fitted step time</dt>
          <dd title="base; each prompt token; each token attended to; each row">
            {seconds(worker.base_s)}
            <small class="muted">
              + {seconds(worker.token_s)}/token, {seconds(1000 * worker.context_s)}/1,000 attended, {seconds(worker.row_s)}/row
            </small>
          </dd>
        </div>
        {worker.num_offline > 0 && <Fact label="Offline" text={counted(worker.num_offline, "sequence")} />}
        {worker.num_swapped_out > 0 && <Fact label="Swapped out" text={counted(worker.num_swapped_out, "sequence")} />}
        {worker.num_free_host_blocks > 0 && !map?.host_cells && (
          <Fact label="Free host blocks" text={count(worker.num_free_host_blocks)} />
        )}
      </dl>
      {map?.cells && (
        <BlockMap
          title="Device"
          cells={map.cells}
          blocksPerCell={map.blocks_per_cell}
          numBlocks={map.num_blocks}
        />
      )}
      {map?.host_cells && (
        <BlockMap
          title="Host memory"
          cells={map.host_cells}
          blocksPerCell={map.host_blocks_per_cell}
          numBlocks={map.num_host_blocks}
        />
      )}
    </section>
  );
}

function Fact({ label, text }: { label: string; text: string }) {
  return (
    <div>
      <dt>{label}</dt>
      <dd>{text}</dd>
    </div>
  );
}

interface BarProps {
  label: string;
  text: string;
  parts: [string, number, string][];
  all: number;
}

function Bar({ label, text, parts, all }: BarProps) {
  return (
    <div>
      <dt>{label}</dt>
      <dd>
        <span class="bar" aria-hidden="true">
          {parts.map(([name, part, color]) => (
            <i key={name} style={{ width: `${all ? (100 * part) / all : 0}%`, background: `var(${color})` }} />
          ))}
        </span>
        {text}
        {parts.length > 1 && (
          <small class="muted"> {parts.map(([name, part]) => `${count(part)} ${name}`).join(", ")}</small>
        )}
      </dd>
    </div>
  );
}
