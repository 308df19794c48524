/** A dot for each request's time to first token: a strip for each preset and part. */

import { seconds } from "../format.ts";
import type { Part, Run } from "./mix.ts";

const COLORS = ["var(--c-blue)", "var(--c-orange)", "var(--c-green)", "var(--c-purple)"];
const WIDTH = 600;
const STRIP = 22;

export function Strips({ runs, mix }: { runs: Run[]; mix: Part[] }) {
  const most = Math.max(1e-6, ...runs.flatMap((run) => run.timings.map((one) => one.ttftS)));
  const x = (value: number) => 8 + (WIDTH - 16) * (value / most);
  return (
    <figure class="strips">
      <figcaption>
        Time to first token of each request, 0 to {seconds(most)}
      </figcaption>
      {runs.map((run) => (
        <div key={run.preset} class="strip">
          <strong>{run.preset}</strong>
          <svg
            viewBox={`0 0 ${WIDTH} ${STRIP * mix.length}`}
            role="img"
            aria-label={`${run.preset}: times to first token. The table below has their percentiles.`}
          >
            {mix.map((part, index) => (
              <g key={index}>
                <line class="axis" x1="0" x2={WIDTH} y1={STRIP * (index + 0.5)} y2={STRIP * (index + 0.5)} />
                {run.timings
                  .filter((one) => one.part === index)
                  .map((one, request) => (
                    <circle
                      key={request}
                      cx={x(one.ttftS)}
                      cy={STRIP * (index + 0.5)}
                      r="6"
                      fill={COLORS[index % COLORS.length]}
                      fill-opacity="0.6"
                    >
                      <title>
                        {part.tenant || `part ${index + 1}`}: {seconds(one.ttftS)}
                      </title>
                    </circle>
                  ))}
              </g>
            ))}
          </svg>
        </div>
      ))}
      <p class="legend">
        {mix.map((part, index) => (
          <span key={index}>
            <i style={{ background: COLORS[index % COLORS.length] ?? "" }} /> {part.tenant || `part ${index + 1}`}
          </span>
        ))}
      </p>
    </figure>
  );
}
