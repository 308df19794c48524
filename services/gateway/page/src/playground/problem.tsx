import type { Field } from "./fields.ts";
import { concerns, type FieldProblem } from "./options.tsx";

const WITH_OWN_PLACE = ["logprobs", "structured_outputs", "tools"];

/** A problem that no control shows at its place. */
export function Problem({ problem, fields }: { problem: (FieldProblem & { needsKey: boolean }) | null; fields: Field[] }) {
  if (!problem || problem.needsKey) return null;
  const names = [...fields.map((field) => field.name), ...WITH_OWN_PLACE];
  const hasPlace = names.some((name) => concerns(problem, name));
  return (
    <p class="notice bad" role="alert">
      {hasPlace ? `The server refuses ${problem.param}: see the options.` : problem.message}
    </p>
  );
}
