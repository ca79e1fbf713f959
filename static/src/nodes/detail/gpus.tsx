// The GPUs of the node, one by one, as its worker lists them: what each has, what is taken, and how busy it is.
import type { ReactNode } from "react";
import { gpusOf, gpuSums } from "../../live/gpus";
import type { LiveNode } from "../../live/messages";
import { Meter } from "../../ui/bars";
import { Panel } from "./panel";

export function Gpus({ node }: { node: LiveNode }): ReactNode {
  const gpus = gpusOf(node);
  if (gpus.length === 0) return null;
  return (
    <Panel title="GPUs" aside={<span className="muted">{gpuSums(gpus)}</span>}>
      <ul className="nd-gpus">
        {gpus.map((gpu) => (
          <li key={gpu.uuid || gpu.index}>
            <div className="row wrap spread">
              <h3 title={gpu.uuid}>
                {gpu.index}: <bdi>{gpu.name}</bdi>
              </h3>
              <span className="muted">{gpu.utilization === null ? "utilisation not reported" : `${gpu.utilization}% busy`}</span>
            </div>
            <Meter name={`VRAM of GPU ${gpu.index}`} used={gpu.total_vram - gpu.free_vram} reserved={gpu.reserved_vram ?? 0} total={gpu.total_vram} />
          </li>
        ))}
      </ul>
    </Panel>
  );
}
