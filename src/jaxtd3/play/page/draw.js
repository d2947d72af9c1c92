// Draws bodies of triangles with WebGL 2: one light, a chequered floor, flat shadows on it.

const VERTEX_BYTES = 20;

const MESH = {
  vertex: `#version 300 es
    in vec3 position; in vec3 normal; in vec4 colour;
    uniform mat4 camera; uniform vec4 turn; uniform vec3 place; uniform vec4 shade; // light, floor
    out vec3 n; out vec3 at; out vec3 tint;
    vec3 rotate(vec3 v) { return v + 2.0 * cross(turn.yzw, cross(turn.yzw, v) + turn.x * v); }
    void main() {
      at = rotate(position) + place;
      if (shade.z > 0.0) at -= vec3(shade.xy, 1.0) * (at.z - shade.w);  // thrown on the floor
      n = rotate(normal); tint = colour.rgb;
      gl_Position = camera * vec4(at, 1.0);
    }`,
  fragment: `#version 300 es
    precision highp float;
    in vec3 n; in vec3 at; in vec3 tint; uniform vec3 eye; uniform vec4 shade; out vec4 result;
    void main() {
      if (shade.z > 0.0) { result = vec4(0.0, 0.0, 0.0, 0.38); return; }
      vec3 m = normalize(n), look = normalize(eye - at), sun = normalize(vec3(0.45, -0.35, 1.0));
      float day = max(dot(m, sun), 0.0), sky = 0.5 + 0.5 * m.z;
      float shine = pow(max(dot(reflect(-sun, m), look), 0.0), 24.0);
      float rim = pow(1.0 - max(dot(m, look), 0.0), 4.0);
      vec3 base = mix(vec3(0.1), tint, 0.9);
      vec3 c = base * (0.24 + 0.36 * sky + 0.72 * day) + 0.16 * shine + 0.10 * rim;
      result = vec4(pow(c, vec3(0.87)), 1.0);
    }`,
};

const FLOOR = {
  vertex: `#version 300 es
    in vec2 corner; uniform mat4 camera; uniform vec4 middle; out vec3 at;
    void main() { at = vec3(middle.xy + corner * middle.w, middle.z);
      gl_Position = camera * vec4(at, 1.0); }`,
  fragment: `#version 300 es
    precision highp float;
    in vec3 at; uniform vec3 eye; uniform vec4 middle; out vec4 result;
    void main() {
      vec2 cell = at.xy, wide = fwidth(cell);
      vec2 wave = (abs(fract((cell - 0.5 * wide) * 0.5) - 0.5)
        - abs(fract((cell + 0.5 * wide) * 0.5) - 0.5)) * 2.0 / wide;  // averaged over a pixel
      float chess = 0.5 - 0.5 * wave.x * wave.y;
      vec2 line = abs(fract(at.xy - 0.5) - 0.5) / wide;
      float edge = 1.0 - min(min(line.x, line.y), 1.0);
      vec3 c = mix(vec3(0.235, 0.275, 0.32), vec3(0.285, 0.33, 0.38), chess);
      c = mix(c, vec3(0.42, 0.47, 0.53), 0.35 * edge);
      float far = smoothstep(0.25, 0.95, distance(at.xy, middle.xy) / middle.w);
      result = vec4(mix(c, vec3(0.105, 0.125, 0.15), far), 1.0);
    }`,
};

function compile(gl, source) {
  const program = gl.createProgram();
  for (const [kind, text] of [[gl.VERTEX_SHADER, source.vertex],
    [gl.FRAGMENT_SHADER, source.fragment]]) {
    const shader = gl.createShader(kind);
    gl.shaderSource(shader, text.trim());
    gl.compileShader(shader);
    if (!gl.getShaderParameter(shader, gl.COMPILE_STATUS)) {
      throw new Error(gl.getShaderInfoLog(shader));
    }
    gl.attachShader(program, shader);
  }
  gl.linkProgram(program);
  if (!gl.getProgramParameter(program, gl.LINK_STATUS)) {
    throw new Error(gl.getProgramInfoLog(program));
  }
  const uniform = {};
  for (let i = 0; i < gl.getProgramParameter(program, gl.ACTIVE_UNIFORMS); i++) {
    const name = gl.getActiveUniform(program, i).name;
    uniform[name] = gl.getUniformLocation(program, name);
  }
  return { program, uniform };
}

// u32 length | JSON | vertices
function readScene(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  return { ...head, vertices: new Uint8Array(buffer, 4 + length) };
}

function lookAt(eye, target, aspect) {
  const sub = (a, b) => a.map((x, i) => x - b[i]);
  const cross = (a, b) => [a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2],
    a[0] * b[1] - a[1] * b[0]];
  const dot = (a, b) => a[0] * b[0] + a[1] * b[1] + a[2] * b[2];
  const unit = (a) => a.map((x) => x / Math.hypot(...a));
  const z = unit(sub(eye, target)), x = unit(cross([0, 0, 1], z)), y = cross(z, x);
  const near = 0.05, far = 120, f = 1 / Math.tan(0.36), p = (far + near) / (near - far);
  const q = 2 * far * near / (near - far), r = [-dot(x, eye), -dot(y, eye), -dot(z, eye)];
  const out = [];
  for (let i = 0; i < 3; i++) out.push(f / aspect * x[i], f * y[i], p * z[i], -z[i]);
  out.push(f / aspect * r[0], f * r[1], p * r[2] + q, -r[2]);
  return new Float32Array(out);
}

// True where the CPU draws, which takes long: fewer pixels then, and no smoothed edges.
function inSoftware() {
  const gl = document.createElement("canvas").getContext("webgl2");
  const info = gl && gl.getExtension("WEBGL_debug_renderer_info");
  const name = info ? gl.getParameter(info.UNMASKED_RENDERER_WEBGL) : "";
  return /swiftshader|llvmpipe|softpipe|software/i.test(name);
}

function makeView(canvas, scene) {
  const plain = inSoftware();
  const gl = canvas.getContext("webgl2", { antialias: !plain, stencil: true, alpha: false });
  if (!gl) throw new Error("this browser has no WebGL 2");
  const mesh = compile(gl, MESH), floor = compile(gl, FLOOR);
  const robot = gl.createVertexArray();
  gl.bindVertexArray(robot);
  gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
  gl.bufferData(gl.ARRAY_BUFFER, scene.vertices, gl.STATIC_DRAW);
  for (const [name, size, kind, scaled, offset] of [["position", 3, gl.FLOAT, false, 0],
    ["normal", 3, gl.BYTE, true, 12], ["colour", 4, gl.UNSIGNED_BYTE, true, 16]]) {
    const at = gl.getAttribLocation(mesh.program, name);
    gl.enableVertexAttribArray(at);
    gl.vertexAttribPointer(at, size, kind, scaled, VERTEX_BYTES, offset);
  }
  const ground = gl.createVertexArray();
  gl.bindVertexArray(ground);
  gl.bindBuffer(gl.ARRAY_BUFFER, gl.createBuffer());
  gl.bufferData(gl.ARRAY_BUFFER, new Float32Array([-1, -1, 1, -1, -1, 1, 1, 1]), gl.STATIC_DRAW);
  const corner = gl.getAttribLocation(floor.program, "corner");
  gl.enableVertexAttribArray(corner);
  gl.vertexAttribPointer(corner, 2, gl.FLOAT, false, 0, 0);

  function bodies(poses, shade, from) {
    gl.uniform4fv(mesh.uniform.shade, shade);
    scene.bodies.forEach((body, i) => {
      if (!body.count || i < from) return;
      const p = 7 * i;
      gl.uniform3f(mesh.uniform.place, poses[p], poses[p + 1], poses[p + 2]);
      gl.uniform4f(mesh.uniform.turn, poses[p + 3], poses[p + 4], poses[p + 5], poses[p + 6]);
      gl.drawArrays(gl.TRIANGLES, body.first, body.count);
    });
  }

  return function draw(poses, eye, target) {
    const ratio = plain ? 0.6 : Math.min(window.devicePixelRatio || 1, 2);
    const width = Math.round(canvas.clientWidth * ratio);
    const height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    gl.viewport(0, 0, width, height);
    gl.clearColor(0.105, 0.125, 0.15, 1);
    gl.clear(gl.COLOR_BUFFER_BIT | gl.DEPTH_BUFFER_BIT | gl.STENCIL_BUFFER_BIT);
    gl.enable(gl.DEPTH_TEST);
    const camera = lookAt(eye, target, width / Math.max(height, 1));
    if (scene.floor !== null) {
      gl.useProgram(floor.program);
      gl.bindVertexArray(ground);
      gl.uniformMatrix4fv(floor.uniform.camera, false, camera);
      gl.uniform3fv(floor.uniform.eye, eye);
      gl.uniform4f(floor.uniform.middle, target[0], target[1], scene.floor, 30);
      gl.drawArrays(gl.TRIANGLE_STRIP, 0, 4);
    }
    gl.useProgram(mesh.program);
    gl.bindVertexArray(robot);
    gl.uniformMatrix4fv(mesh.uniform.camera, false, camera);
    gl.uniform3fv(mesh.uniform.eye, eye);
    if (scene.floor !== null) {  // each pixel is darkened once
      gl.enable(gl.STENCIL_TEST);
      gl.enable(gl.BLEND);
      gl.blendFunc(gl.SRC_ALPHA, gl.ONE_MINUS_SRC_ALPHA);
      gl.stencilFunc(gl.EQUAL, 0, 255);
      gl.stencilOp(gl.KEEP, gl.KEEP, gl.INCR);
      gl.depthMask(false);
      bodies(poses, [0.45, -0.35, 1, scene.floor + 0.002], 1);
      gl.depthMask(true);
      gl.disable(gl.BLEND);
      gl.disable(gl.STENCIL_TEST);
    }
    gl.enable(gl.CULL_FACE);
    bodies(poses, [0, 0, 0, 0], 0);
    gl.disable(gl.CULL_FACE);
  };
}
